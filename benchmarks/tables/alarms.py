"""The measured blocks of docs/correction.md about alarms."""

from collections.abc import Mapping
from typing import Any

from benchmarks.tables.markdown import Column, Form, Row, facts, failures, grid, joined, table
from trainer_bridge.metrics import alarms as thresholds

Results = Mapping[str, Any]
FIRED = "alarm: "
"""A metric with this before an alarm's name is the number of batches in which the alarm fired."""
JUDGED = {
    "kl_of_entropy": ("mismatch_kl_k3", thresholds.KL_OF_ENTROPY),
    "token_mult_prob_error": ("token_mult_prob_error", thresholds.PROB_ERROR),
    "ess": ("ess", thresholds.ESS),
    "ratio_mean": ("ratio_mean", thresholds.RATIO_BIAS),
}
"""A row's metric -> the alarm that is about it, and where that fires."""


def faults(results: Results) -> str:
    """One line a rollout: what it looks like, and which alarms fire."""
    rows = results["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    batches = max(row["n"] for row in rows)

    def fired(row: Row) -> str:
        version, _, name = row["metric"].removeprefix(FIRED).rpartition("/")
        times = "" if row["median"] == batches else f" {row['median']:.0f}"
        return f"{'v:' if version else ''}`{name}`{times}"

    every: dict[str, Form] = dict.fromkeys(
        sorted({row["metric"] for row in rows if row["metric"].startswith(FIRED)}), fired
    )
    shown: dict[str, dict[str, Form]] = {
        "KL of entropy": {"kl_of_entropy": lambda row: _share(row["median"])},
        "mean ratio": {"ratio_mean": "{median:.4f}"},
        "alarms": every,
    }
    columns = [
        Column(f"{head}, {model}", metrics, {"model": model})
        for head, metrics in shown.items()
        for model in models
    ]
    tokens = [row["median"] for row in rows if row["metric"] == "tokens"]
    return joined(
        table(rows, ["case", "arm"], columns, "rollout"),
        failures(results),
        f"{facts(results['environment'])}. Medians of {batches} batches of {min(tokens):.0f} to "
        f"{max(tokens):.0f} tokens.",
    )


def margins(results: Results) -> str:
    """One line an alarm: how far healthy rollouts stay away, and what fires it."""
    rows = results["rows"]
    lines = []
    for metric, (alarm, threshold) in JUDGED.items():
        judged = [row for row in rows if row["metric"] == metric]
        healthy = [row for row in judged if row["case"] == "healthy"]
        fired = {(r["arm"], r["model"]) for r in rows if r["metric"] == f"{FIRED}{alarm}"}
        faulty = [r for r in judged if r["case"] == "faulty" and (r["arm"], r["model"]) in fired]
        lines.append([f"`{alarm}`", *_margin(metric, healthy, threshold, faulty)])
    return grid(["alarm", "worst healthy", "fires", "faults that fire it"], lines)


def _margin(
    metric: str, healthy: list[Row], threshold: float, faulty: list[Row]
) -> tuple[str, str, str]:
    medians = sorted(row["median"] for row in faulty)
    if metric == "ess":
        worst = min(row["min"] for row in healthy)
        return f"{worst:.4f}", f"below {threshold}", f"{medians[0]:.2f} to {medians[-1]:.2f}"
    if metric == "ratio_mean":
        worst = max(max(abs(row["min"] - 1), abs(row["max"] - 1)) for row in healthy)
        away = sorted(abs(median - 1) for median in medians)
        return (
            f"{worst:.4f} from 1",
            f"{threshold} from 1, and {thresholds.RATIO_SIGMAS:.0f} standard errors",
            f"{away[0]:.4f} to {away[-1]:.2f} from 1",
        )
    worst = max(row["max"] for row in healthy)
    if metric == "kl_of_entropy":
        return (
            f"{worst:.1%} of the entropy",
            f"above {threshold:.0%} of it, or {thresholds.KL_MOST} nats",
            f"{_share(medians[0])} to {_share(medians[-1])}",
        )
    return f"{worst:.3f}", f"above {threshold}", f"{medians[0]:.2f} to {medians[-1]:.0f}"


def _share(value: float) -> str:
    return f"{value:.2%}" if value < 1 else f"{value:.1f} times"
