"""Runs of a framework's trainer on FP8 and on BF16 rollouts: what their rewards say, and a picture.

A row is a step of a run: arm, seed, step, reward, mismatch_kl_k3, ess.
"""

from pathlib import Path
from statistics import fmean
from typing import Any

PANELS = {"reward": "reward", "mismatch_kl_k3": "mismatch KL (k3, nats)", "ess": "ESS"}
Row = dict[str, Any]


def mean_rewards(rows: list[Row]) -> dict[str, list[float]]:
    """Of all steps of each run: by arm, in the order of the seeds."""
    return {arm: [fmean(of(run, "reward")) for run in _runs(rows, arm)] for arm in _arms(rows)}


def reward_of(rows: list[Row], at: int) -> list[float]:
    """The reward of each run at a step, 0 for the first and -1 for the last."""
    return [of(run, "reward")[at] for arm in _arms(rows) for run in _runs(rows, arm)]


def table(rows: list[Row]) -> str:
    """A line an arm."""
    lines = [
        "| rollouts | seeds | mean reward | first step | last step | mismatch KL | largest |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, means in mean_rewards(rows).items():
        runs = _runs(rows, arm)
        kl = [value for run in runs for value in of(run, "mismatch_kl_k3")]
        first, last = (fmean(of(run, "reward")[at] for run in runs) for at in (0, -1))
        lines.append(
            f"| {arm.upper()} | {len(runs)} | {fmean(means):.3f} | {first:.2f} | {last:.2f} "
            f"| {fmean(kl):.1e} | {max(kl):.1e} |"
        )
    return "\n".join(lines)


def where(environment: Row, *names: str) -> str:
    """The device, the versions of ``names``, date and commit."""
    versions = ", ".join(f"{name} {environment[name]}" for name in names)
    return (
        f"{environment['device']}, {versions}, {environment['date']}, commit "
        f"{environment['commit']}."
    )


def draw(rows: list[Row], picture: Path) -> None:
    """A panel a metric, a line a run, a color an arm.

    Args:
        rows: the environment's, then those of the steps.
    """
    from matplotlib.figure import Figure

    steps = rows[1:]
    figure = Figure(figsize=(12, 3), layout="constrained")
    for panel, (name, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for arm, color in zip(_arms(steps), ("tab:gray", "tab:orange"), strict=True):
            for label, run in zip([arm.upper(), *[None] * len(steps)], _runs(steps, arm)):  # noqa: B905
                panel.plot(of(run, "step"), of(run, name), color=color, label=label, linewidth=1)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("step", fontsize=9)
        panel.grid(alpha=0.3)
        if name == "mismatch_kl_k3":
            panel.set_yscale("log")
    panel.legend(fontsize=9)
    figure.savefig(picture, dpi=130)


def of(run: list[Row], name: str) -> list[float]:
    """A metric by steps."""
    return [row[name] for row in run]


def _arms(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["arm"] for row in rows))


def _runs(rows: list[Row], arm: str) -> list[list[Row]]:
    """The steps of each seed."""
    seeds = dict.fromkeys(row["seed"] for row in rows if row["arm"] == arm)
    return [[row for row in rows if (row["arm"], row["seed"]) == (arm, seed)] for seed in seeds]
