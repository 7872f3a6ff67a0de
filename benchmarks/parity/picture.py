"""docs/parity.png: reward curves of each model, and the mismatch behind them.

python -m benchmarks.parity.picture
"""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from benchmarks.parity.arms import ARMS, Arm
from benchmarks.parity.summary import RESULTS
from benchmarks.parity.verdict import rows_of

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "parity.png"
COLOURS = {arm: f"C{i}" for i, arm in enumerate(ARMS)}
WINDOW = 10
"""Steps of the running mean."""
PANELS: tuple[tuple[str, str, Callable[[Arm], bool]], ...] = (
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

    rows = rows_of(text)
    figure = Figure(figsize=(15, 8.5), layout="constrained")
    panels = figure.subplots(2, 3).flatten()
    for panel, (metric, label, shows) in zip(panels, PANELS, strict=True):
        for arm in filter(shows, ARMS.values()):
            mine = [row["series"] for row in rows if row.get("arm") == arm.name and "series" in row]
            curves = [_curve(metric, series[metric]) for series in mine if metric in series]
            if curves:
                at = list(zip(*curves, strict=True))
                low, mean, high = (list(map(f, at)) for f in (min, fmean, max))
                (line,) = panel.plot(mean, color=COLOURS[arm.name], label=arm.name)
                panel.fill_between(
                    range(len(at)), low, high, color=line.get_color(), alpha=0.15, linewidth=0
                )
        panel.set_title(label, fontsize=10)
        panel.set_xlabel("GRPO step", fontsize=9)
        panel.grid(alpha=0.3)
        if metric == "reward":
            panel.set_ylim(0, 1)
        elif metric == "clipped_fraction":
            panel.set_yscale("symlog", linthresh=1e-5)
        else:
            panel.set_yscale("log")
    handles = {line.get_label(): line for panel in panels for line in panel.lines}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)
    e = rows[0]
    figure.suptitle(
        f"GRPO with BF16 and FP8 rollouts, {e['device']}, commit {e['commit']}; lines: means over "
        f"seeds and {WINDOW} steps, bands: least to largest seed",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)


def _curve(metric: str, values: list[float]) -> list[float]:
    """Its running mean, as it is drawn."""
    if metric == "ess":
        values = [max(1 - value, 1e-8) for value in values]
    return [fmean(values[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(values))]


if __name__ == "__main__":
    draw(RESULTS.read_text(), PICTURE)
