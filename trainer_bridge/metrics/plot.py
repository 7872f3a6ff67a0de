"""Plot runs side by side from their JSONL files: one panel per metric, one line per run."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer_bridge.metrics.alarms import check_alarms

DEFAULT = (
    "reward",
    "mismatch_kl_k3",
    "ess",
    "clipped_fraction",
    "masked_fraction",
    "ratio_p99",
    "token_mult_prob_error",
    "chi2_seq",
    "step_s",
)
LOGARITHMIC = frozenset({"mismatch_kl_k3", "token_mult_prob_error"})
"""Never negative, and orders of magnitude apart between BF16, FP8 and a step with an alarm."""
COLUMNS = 3
Series = dict[str, dict[int, dict[str, float]]]


def read_runs(runs: Sequence[Path]) -> Series:
    """The numbers of each run by step.

    A run is a JSONL file, or a folder of them. Rows without a step are skipped; rows with an "arm"
    form one run per arm. Of a step that appears twice, as after a resume, the later row counts.

    Raises:
        ValueError: a run has no row with a step, or a line that is not a JSON object.
    """
    series: Series = defaultdict(dict)
    for run in runs:
        files = sorted(run.glob("*.jsonl")) if run.is_dir() else [run]
        found = False
        for file in files:
            for number, line in enumerate(file.read_text().splitlines(), 1):
                row = _parse(line, f"{file}:{number}")
                if row is None or not isinstance(row.get("step"), int):
                    continue
                found = True
                name = run.stem if len(files) < 2 else f"{run.stem}/{file.stem}"
                arm = f" {row['arm']}" if "arm" in row else ""
                kept = {k: float(v) for k, v in row.items() if isinstance(v, int | float)}
                series[name + arm].setdefault(row["step"], {}).update(kept)
        if not found:
            raise ValueError(f"{run} has no row with a step; pass a JSONL file of metrics")
    return dict(series)


def draw(runs: Sequence[Path], picture: Path, metrics: Sequence[str] = ()) -> list[str]:
    """Draw metrics of runs, with a cross where a step has an alarm of that metric.

    Args:
        runs: JSONL files, or folders of them.
        picture: the image to write; its suffix selects the format.
        metrics: names to draw; default those of DEFAULT that the runs have.

    Returns:
        The names that were drawn.

    Raises:
        ValueError: as ``read_runs``, or no run has a requested metric.
    """
    series = read_runs(runs)
    known = {name for steps in series.values() for row in steps.values() for name in row}
    if missing := [name for name in metrics if name not in known]:
        raise ValueError(
            f"no run has {', '.join(missing)}; there are {', '.join(sorted(known - {'step'}))}"
        )
    chosen = list(metrics) or [name for name in DEFAULT if name in known]
    if not chosen:
        raise ValueError(
            f"the runs have none of {', '.join(DEFAULT)}; choose from {', '.join(sorted(known))}"
        )
    from matplotlib.figure import Figure

    alarmed = {
        run: {step: {alarm.name for alarm in check_alarms(row)} for step, row in steps.items()}
        for run, steps in series.items()
    }
    rows = -(-len(chosen) // COLUMNS)
    columns = min(COLUMNS, len(chosen))
    figure = Figure(figsize=(4.2 * columns, 2.8 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, name in zip(panels, chosen, strict=False):
        for run, steps in series.items():
            points = [(step, steps[step][name]) for step in sorted(steps) if name in steps[step]]
            if not points:
                continue
            (line,) = panel.plot(*zip(*points, strict=True), label=run, linewidth=1)
            fired = [(step, y) for step, y in points if name in alarmed[run][step]]
            panel.plot(*zip(*fired, strict=True), "x", color=line.get_color()) if fired else None
        if name in LOGARITHMIC and panel.dataLim.ymax > 0:
            panel.set_yscale("log")
        panel.set_title(name, fontsize=10)
        panel.grid(alpha=0.3)
    for panel in panels[len(chosen) :]:
        panel.remove()
    figure.supxlabel("step", fontsize=9)
    handles = {text: h for p in panels[: len(chosen)] for h, text in zip(*_legend(p), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=4, fontsize=9)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)
    return chosen


def _legend(panel: Any) -> tuple[list[Any], list[str]]:
    handles, names = panel.get_legend_handles_labels()
    return handles, names


def _parse(line: str, where: str) -> dict[str, Any] | None:
    if not line.strip():
        return None
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error}); pass a JSONL file of metrics") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not a JSON object; pass a JSONL file of metrics")
    return row
