"""What ``python -m benchmarks.trl_parity`` found: the verdict, a table and a picture."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.parity.comparison import compare

MARGIN, ALPHA = 0.1, 0.05
PICTURE = ROOT / "docs" / "trl.png"
PANELS = {"reward": "reward", "mismatch_kl_k3": "mismatch KL (k3, nats)", "ess": "ESS"}
Row = dict[str, Any]


def judge(rows: list[Row]) -> Row:
    """What was asked and predicted, of all steps."""
    means = {arm: [fmean(of(run, "reward")) for run in _runs(rows, arm)] for arm in _arms(rows)}
    result = compare(means["fp8"], means["bf16"], MARGIN, ALPHA)
    last = max(row["step"] for row in rows)
    return {
        "mean_reward": means,
        "difference": result.mean,
        "interval": result.interval,
        "p_tost": result.p_tost,
        "equivalent": result.p_tost is not None and result.p_tost < ALPHA,
        "first_reward": [row["reward"] for row in rows if row["step"] == 0],
        "last_reward": [row["reward"] for row in rows if row["step"] == last],
        "steps_with_an_alarm": sum(row["alarms"] > 0 for row in rows),
        "versions_are_steps": all(row["policy_version"] == row["step"] for row in rows),
    }


def table(text: str) -> str:
    """Of results/trl.jsonl."""
    environment, *rows = map(json.loads, text.splitlines())
    verdict = judge(rows)
    lines = [
        "| rollouts | seeds | mean reward | first step | last step | mismatch KL | largest |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, means in verdict["mean_reward"].items():
        runs = _runs(rows, arm)
        kl = [value for run in runs for value in of(run, "mismatch_kl_k3")]
        first, last = (fmean(of(run, "reward")[at] for run in runs) for at in (0, -1))
        lines.append(
            f"| {arm.upper()} | {len(runs)} | {fmean(means):.3f} | {first:.2f} | {last:.2f} "
            f"| {fmean(kl):.1e} | {max(kl):.1e} |"
        )
    low, high = verdict["interval"]
    names = ("sglang", "torch", "transformers", "trl", "accelerate")
    versions = ", ".join(f"{name} {environment[name]}" for name in names)
    return "\n".join(lines) + (
        f"\n\nMean reward of all steps, FP8 less BF16: {verdict['difference']:+.3f} (90% interval "
        f"{low:+.3f} to {high:+.3f}), {'' if verdict['equivalent'] else 'not '}equivalent within "
        f"{MARGIN} (TOST, p = {verdict['p_tost']:.1g}). Steps with an alarm: "
        f"{verdict['steps_with_an_alarm']} of {len(rows)}. {environment['device']}, {versions}, "
        f"{environment['date']}, commit {environment['commit']}."
    )


def draw(text: str, picture: Path) -> None:
    """A panel a metric, a line a run, a color an arm."""
    from matplotlib.figure import Figure

    rows = [json.loads(line) for line in text.splitlines()[1:]]
    figure = Figure(figsize=(12, 3), layout="constrained")
    for panel, (name, title) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for arm, color in zip(_arms(rows), ("tab:gray", "tab:orange"), strict=True):
            for label, run in zip([arm.upper(), *[None] * len(rows)], _runs(rows, arm)):  # noqa: B905
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
