"""The picture of docs/performance.md, from the results of the rollout benchmark."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.tables.engines import REFERENCE, loads_of, models_of

COLOURS = {"stock": "tab:blue", "fp8rl": "tab:orange"}


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Decode speed over stock BF16, a group of bars a load, with the floor of each arm above."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    e, rows = results["environment"], results["rows"]
    found = {
        (row["arm"], f"{row['model']}\n{row['case']}", row["metric"]): row["median"] for row in rows
    }
    arms = list(dict.fromkeys(arm for arm, _, metric in found if metric == "decode_step_ms"))
    cases = [
        f"{model}\n{load}"
        for model in models_of(rows)
        for load in loads_of([row for row in rows if row["model"] == model])
        if (REFERENCE, f"{model}\n{load}", "decode_step_ms") in found
    ]
    figure, axis = pyplot.subplots(figsize=(11, 5), layout="constrained")
    width = 0.8 / max(1, len(arms))
    shades = {kind: iter((0.35, 0.5, 0.65, 0.8, 0.9, 1.0)) for kind in COLOURS}
    for number, arm in enumerate(arms):
        kind = "stock" if arm.startswith("stock") else "fp8rl"
        there = [i for i, case in enumerate(cases) if (arm, case, "decode_step_ms") in found]
        at = [i + (number - (len(arms) - 1) / 2) * width for i in there]
        base = [found[REFERENCE, cases[i], "decode_step_ms"] for i in there]
        step = [found[arm, cases[i], "decode_step_ms"] for i in there]
        floor = [found[arm, cases[i], "decode_floor_ms"] for i in there]
        speeds = [b / s for b, s in zip(base, step, strict=True)]
        axis.bar(at, speeds, width, color=COLOURS[kind], alpha=next(shades[kind]), label=arm)
        limits = [b / f for b, f in zip(base, floor, strict=True)]
        axis.scatter(at, limits, marker="_", color="black", s=80, linewidths=1)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(cases)), cases)
    axis.set_ylabel("decode speed over stock BF16")
    axis.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=8, ncols=4)
    figure.suptitle(
        f"{e['device']}, SGLang {e['sglang']}, commit {e['commit']}; dashes: floor of the arm's "
        f"bytes at the bandwidth of a copy",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
