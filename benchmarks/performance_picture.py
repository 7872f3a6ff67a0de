"""The picture of docs/performance.md, from the results of rollout.py."""

import json
from pathlib import Path

from benchmarks.performance_tables import REFERENCE, arms_of, cases_of

COLOURS = {"stock": "tab:blue", "fp8rl": "tab:orange"}


def draw(text: str, path: Path) -> None:
    """Decode speed over stock BF16, a group of bars a load, with the floor of each arm above."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    content = json.loads(text)
    e = content["environment"]
    found = {
        (row["arm"], f"{row['model']}\n{row['case']}", row["metric"]): row
        for row in content["rows"]
    }
    arms = arms_of(found, "decode_step_ms")
    cases = [case for case in cases_of(found) if (REFERENCE, case, "decode_step_ms") in found]
    figure, axis = pyplot.subplots(figsize=(11, 5), layout="constrained")
    width = 0.8 / max(1, len(arms))
    shades = {kind: iter((0.35, 0.5, 0.65, 0.8, 0.9, 1.0)) for kind in COLOURS}
    for number, arm in enumerate(arms):
        kind = "stock" if arm.startswith("stock") else "fp8rl"
        there = [i for i, case in enumerate(cases) if (arm, case, "decode_step_ms") in found]
        at = [i + (number - (len(arms) - 1) / 2) * width for i in there]
        base = [found[REFERENCE, cases[i], "decode_step_ms"]["median"] for i in there]
        step = [found[arm, cases[i], "decode_step_ms"]["median"] for i in there]
        floor = [found[arm, cases[i], "decode_floor_ms"]["median"] for i in there]
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
