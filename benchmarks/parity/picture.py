"""docs/parity.png: reward curves of each model, and the mismatch behind them."""

from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.parity import summary
from benchmarks.parity.paths import Row
from benchmarks.parity.variants import ARMS

COLOURS = dict(zip(ARMS, (f"C{i}" for i in range(10)), strict=False))
WINDOW = 10
"""Steps of the running mean of rewards."""
PANELS = (
    ("reward", "reward, dense", lambda arm: arm.model == "dense" and not arm.planted),
    ("reward", "reward, mixture of experts", lambda arm: arm.model == "moe"),
    ("reward", "reward, planted K outliers", lambda arm: arm.planted or arm.name == "bf16"),
    ("mismatch_kl_k3", "mismatch KL (k3, nats a token)", lambda arm: True),
    ("ess", "1 - ESS", lambda arm: True),
    ("clipped_fraction", "fraction of tokens above C", lambda arm: True),
)


def draw(text: str, path: Path) -> None:
    """Mean over seeds as a line, least to largest as a band."""
    from matplotlib.figure import Figure

    rows = summary.read(text)
    runs = [row for row in rows if row["kind"] == "run"]
    figure = Figure(figsize=(15, 8.5), layout="constrained")
    panels = figure.subplots(2, 3).flatten()
    for panel, (metric, label, shows) in zip(panels, PANELS, strict=True):
        for arm in filter(shows, ARMS.values()):
            mine = [run for run in runs if run["arm"] == arm.name and metric in run["series"]]
            if mine:
                _curve(panel, arm.name, metric, mine)
        panel.set_title(label, fontsize=10)
        panel.set_xlabel("GRPO step", fontsize=9)
        panel.grid(alpha=0.3)
        if metric == "reward":
            panel.set_ylim(0, 1)
        elif panel.lines:
            panel.set_yscale("log" if metric != "clipped_fraction" else "symlog", **_linear(metric))
    handles = {line.get_label(): line for panel in panels for line in panel.lines}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)
    e = rows[0]
    seeds = len({run["seed"] for run in runs})
    figure.suptitle(
        f"GRPO with BF16 and FP8 rollouts, {e['device']}, commit {e['commit']}; lines: means over "
        f"up to {seeds} seeds and {WINDOW} steps, bands: least to largest seed",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)


def _curve(panel: Any, arm: str, metric: str, runs: list[Row]) -> None:
    curves = [_smooth([_shown(metric, value) for value in run["series"][metric]]) for run in runs]
    steps = range(min(map(len, curves)))
    at = [[curve[i] for curve in curves] for i in steps]
    panel.plot(steps, list(map(fmean, at)), color=COLOURS[arm], label=arm, linewidth=1.5)
    panel.fill_between(
        steps, list(map(min, at)), list(map(max, at)), color=COLOURS[arm], alpha=0.15, linewidth=0
    )


def _shown(metric: str, value: float) -> float:
    return max(1 - value, 1e-8) if metric == "ess" else value


def _smooth(values: list[float]) -> list[float]:
    return [fmean(values[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(values))]


def _linear(metric: str) -> dict[str, float]:
    """Of a symlog axis: below this it is linear, down to a fraction of none."""
    return {"linthresh": 1e-5} if metric == "clipped_fraction" else {}
