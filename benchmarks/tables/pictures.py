"""The picture of docs/performance.md, from the results of the rollout benchmark."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.tables.engines import REFERENCE, loads_of, models_of

PICTURE = ROOT / "docs" / "performance.png"
COLOURS = {"stock": "tab:blue", "fp8rl": "tab:orange"}
DECODE, PREFILL, FLOOR = "decode_step_ms", "prefill_s", "decode_floor_ms"

Medians = Mapping[tuple[str, str, str], float]
"""By arm, model and load, and metric."""


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Speed of decode and of prefill over stock BF16, a group of bars a load.

    Above the bars of decode, the floor of each arm.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    e, rows = results["environment"], results["rows"]
    found = {
        (row["arm"], f"{row['model']}\n{row['case']}", row["metric"]): row["median"] for row in rows
    }
    cases = [
        f"{model}\n{load}"
        for model in models_of(rows)
        for load in loads_of([row for row in rows if row["model"] == model])
        if (REFERENCE, f"{model}\n{load}", DECODE) in found
    ]
    figure, (above, below) = pyplot.subplots(2, figsize=(11, 8), layout="constrained")
    _compare(above, found, cases, DECODE, FLOOR)
    above.set_ylabel("decode, times as fast as stock BF16")
    _compare(below, found, cases, PREFILL, None)
    below.set_ylabel("prefill, times as fast as stock BF16")
    figure.legend(*above.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(
        f"{e['device']}, SGLang {e['sglang']}, commit {e['commit']}; dashes: floor of the arm's "
        f"bytes at the bandwidth of a copy",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _compare(
    axis: Any, found: Medians, cases: list[str], metric: str, floor_metric: str | None
) -> None:
    arms = list(dict.fromkeys(arm for arm, _, of in found if of == DECODE))
    width = 0.8 / max(1, len(arms))
    shades = {kind: iter((0.35, 0.5, 0.65, 0.8, 0.9, 1.0)) for kind in COLOURS}
    for number, arm in enumerate(arms):
        kind = "stock" if arm.startswith("stock") else "fp8rl"
        there = [i for i, case in enumerate(cases) if (arm, case, metric) in found]
        at = [i + (number - (len(arms) - 1) / 2) * width for i in there]

        def speeds(of: str, arm: str = arm, there: list[int] = there) -> list[float]:
            places = [cases[i] for i in there]
            return [found[REFERENCE, case, metric] / found[arm, case, of] for case in places]

        axis.bar(
            at, speeds(metric), width, color=COLOURS[kind], alpha=next(shades[kind]), label=arm
        )
        if floor_metric is not None:
            axis.scatter(at, speeds(floor_metric), marker="_", color="black", s=80, linewidths=1)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(cases)), cases)
    axis.grid(axis="y", alpha=0.3)
