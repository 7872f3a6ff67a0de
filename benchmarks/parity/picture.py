"""A picture of each study: reward curves of each model, and the mismatch behind them.

python -m benchmarks.parity.picture
"""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from benchmarks.parity.arms import ARMS, Arm
from benchmarks.parity.models import PRETRAINED
from benchmarks.parity.run_log import Row, rows_of
from benchmarks.parity.summary import RESULTS

DOCS = Path(__file__).resolve().parents[2] / "docs"
PICTURES = {
    RESULTS: DOCS / "parity.png",
    RESULTS.with_name("pretrained_grpo.jsonl"): DOCS / "pretrained_grpo.png",
}
"""By the file of the study."""
COLOURS = {arm: f"C{i}" for i, arm in enumerate(ARMS)}
WINDOW = 10
"""Steps of the running mean."""
COLUMNS = 3
PANELS: tuple[tuple[str, str, Callable[[Arm], bool]], ...] = (
    ("reward", "reward, dense", lambda arm: arm.model == "dense" and not arm.planted),
    ("reward", "reward, mixture of experts", lambda arm: arm.model == "moe"),
    ("reward", "reward, planted K outliers", lambda arm: arm.planted or arm.name == "bf16"),
    ("reward", "reward, SmolLM2-135M-Instruct", lambda arm: arm.model == PRETRAINED),
    ("mismatch_kl_k3", "mismatch KL (k3, nats a token)", lambda arm: True),
    ("ess", "1 - ESS", lambda arm: True),
    ("clipped_fraction", "fraction of tokens above C", lambda arm: True),
)


def draw(rows: list[Row], path: Path) -> None:
    """Mean over seeds as a line, least to largest as a band."""
    from matplotlib.figure import Figure

    drawn = [panel for panel in PANELS if _curves(rows, *panel)]
    lines = -(-len(drawn) // COLUMNS)
    figure = Figure(figsize=(15, 4.25 * lines), layout="constrained")
    panels = figure.subplots(lines, COLUMNS).flatten()
    for panel in panels[len(drawn) :]:
        panel.set_visible(False)
    for panel, (metric, label, shows) in zip(panels, drawn, strict=False):
        for arm, curves in _curves(rows, metric, label, shows).items():
            at = list(zip(*curves, strict=True))
            low, mean, high = (list(map(f, at)) for f in (min, fmean, max))
            (line,) = panel.plot(mean, color=COLOURS[arm], label=arm)
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


def _curves(
    rows: list[Row], metric: str, _: str, shows: Callable[[Arm], bool]
) -> dict[str, list[list[float]]]:
    """Each arm's curves, one a seed."""
    series = [(row["arm"], row["series"]) for row in rows if row.get("kind") == "run"]
    return {
        arm.name: [_curve(metric, found[metric]) for name, found in series if name == arm.name]
        for arm in filter(shows, ARMS.values())
        if any(name == arm.name and metric in found for name, found in series)
    }


def _curve(metric: str, values: list[float]) -> list[float]:
    """Its running mean, as it is drawn."""
    if metric == "ess":
        values = [max(1 - value, 1e-8) for value in values]
    return [fmean(values[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(values))]


def draw_all() -> None:
    """The picture of each study that has results."""
    for results, picture in PICTURES.items():
        if results.exists():
            draw(rows_of(results), picture)


if __name__ == "__main__":
    draw_all()
