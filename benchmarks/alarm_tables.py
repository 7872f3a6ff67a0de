"""The docs' tables of alarms, from results/alarms.json."""

import json
from typing import Any

from trainer_bridge.metrics import alarms

JUDGED = {
    "kl_of_entropy": ("mismatch_kl_k3", alarms.KL_OF_ENTROPY),
    "token_mult_prob_error": ("token_mult_prob_error", alarms.PROB_ERROR),
    "ess": ("ess", alarms.ESS),
    "ratio_mean": ("ratio_mean", alarms.RATIO_BIAS),
}
"""A row's metric -> the alarm that is about it, and where that fires."""

Rows = list[dict[str, Any]]


def faults(text: str) -> str:
    """One line a rollout: what it looks like, and which alarms fire."""
    content = json.loads(text)
    rows, e = content["rows"], content["environment"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    heads = [f"{head}, {model}" for head in ("KL of entropy", "mean ratio") for model in models]
    lines = [
        f"| rollout | {' | '.join(heads)} | alarms, {' | '.join(models)} |",
        "|---" * (1 + 3 * len(models)) + "|",
    ]
    for state in dict.fromkeys(row["case"] for row in rows):
        lines.append(f"| **{state}** |{' |' * (3 * len(models))}")
        for arm in dict.fromkeys(row["arm"] for row in rows if row["case"] == state):
            mine = [[r for r in rows if (r["arm"], r["model"]) == (arm, m)] for m in models]
            cells = [_share(_of(part, "kl_of_entropy")["median"]) for part in mine]
            cells += [f"{_of(part, 'ratio_mean')['median']:.4f}" for part in mine]
            cells += [_fired(part) for part in mine]
            lines.append(f"| {arm} | {' | '.join(cells)} |")
    batches = max(row["n"] for row in rows)
    tokens = [row["median"] for row in rows if row["metric"] == "tokens"]
    return "\n".join(lines) + (
        f"\n\n`{e['command']}`, {e['device']}, torch {e['torch']}, {e['date']}, commit "
        f"{e['commit']}: medians of {batches} batches of {min(tokens):.0f} to {max(tokens):.0f} "
        f"tokens{_trained(e)}. A number behind an alarm: it fired in so many of them only; v: for "
        f"the policy version at fault."
    )


def margins(text: str) -> str:
    """One line an alarm: how far healthy rollouts stay away, and what fires it."""
    rows: Rows = json.loads(text)["rows"]
    lines = ["| alarm | worst healthy | fires | faults that fire it |", "|---|---|---|---|"]
    for metric, (alarm, threshold) in JUDGED.items():
        healthy = [r for r in rows if (r["metric"], r["case"]) == (metric, "healthy")]
        sick = [
            found
            for first in rows
            if first["case"] == "faulty" and alarm in first.get("alarms", ())
            for found in rows
            if (found["arm"], found["model"], found["metric"])
            == (first["arm"], first["model"], metric)
        ]
        lines.append(f"| `{alarm}` | {' | '.join(_margin(metric, healthy, threshold, sick))} |")
    return "\n".join(lines)


def _margin(metric: str, healthy: Rows, threshold: float, sick: Rows) -> tuple[str, str, str]:
    medians = sorted(row["median"] for row in sick)
    if metric == "ess":
        worst = min(row["min"] for row in healthy)
        return f"{worst:.4f}", f"below {threshold}", f"{medians[0]:.2f} to {medians[-1]:.2f}"
    if metric == "ratio_mean":
        worst = max(max(abs(row["min"] - 1), abs(row["max"] - 1)) for row in healthy)
        away = sorted(abs(median - 1) for median in medians)
        return (
            f"{worst:.4f} from 1",
            f"{threshold} from 1, and {alarms.RATIO_SIGMAS:.0f} standard errors",
            f"{away[0]:.4f} to {away[-1]:.2f} from 1",
        )
    worst = max(row["max"] for row in healthy)
    if metric == "kl_of_entropy":
        return (
            f"{worst:.1%} of the entropy",
            f"above {threshold:.0%} of it, or {alarms.KL_MOST} nats",
            f"{_share(medians[0])} to {_share(medians[-1])}",
        )
    return f"{worst:.3f}", f"above {threshold}", f"{medians[0]:.2f} to {medians[-1]:.0f}"


def _trained(environment: dict[str, Any]) -> str:
    """Which commits trained the policies, where they are others than the one that measured."""
    return "".join(
        f"; policy {name} trained by commit {commit}"
        for name, commit in environment.get("policies", {}).items()
        if commit != environment["commit"]
    )


def _share(value: float) -> str:
    return f"{value:.2%}" if value < 1 else f"{value:.1f} times"


def _of(rows: Rows, metric: str) -> dict[str, Any]:
    return next(row for row in rows if row["metric"] == metric)


def _fired(rows: Rows) -> str:
    """The alarms of one arm and model, each once."""
    counts: dict[str, int] = rows[0]["alarms"]
    shown = []
    for name, count in counts.items():
        version, _, bare = name.rpartition("/")
        times = "" if count == rows[0]["n"] else f" {count}"
        shown.append(f"{'v:' if version else ''}`{bare}`{times}")
    return ", ".join(shown)
