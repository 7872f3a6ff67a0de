"""The first figures of the README, a sentence from each of some result files."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tables.engines import REFERENCE
from benchmarks.tables.markdown import Row, runs_of_each_arm

OURS = "fp8rl-kv8"
MAPPED = "from BF16, mapped"


Results = Mapping[str, Any]


def decode(results: Results) -> str:
    """How much faster a decode step of the one load is."""
    steps = [row for row in results["rows"] if row["metric"] == "decode_step_ms"]
    (ours,) = (row for row in steps if row["arm"] == OURS)
    batch, context = ours["case"].split("x")
    load = f"{ours['model']}, {batch} sequences, {context} tokens of context"
    return f"- A decode step is {_faster(steps, ours)} ({load}; {_where(results)})."


def _faster(rows: Sequence[Row], ours: Row) -> str:
    """Than stock in BF16, where it ran, and than the best of stock."""
    arms = {REFERENCE: "BF16", "stock": "the best stock arm"}
    found = ((_best(rows, ours, prefix), name) for prefix, name in arms.items())
    faster = (
        f"{best / ours['median']:.2f} times as fast as in {name}" for best, name in found if best
    )
    return ", and ".join(faster)


def _best(rows: Sequence[Row], ours: Row, prefix: str) -> float:
    """The least median of arms whose name begins so, under the same load; 0 where none ran."""
    place = ours["model"], ours["case"]
    mine = [row for row in rows if (row["model"], row["case"]) == place]
    if prefix == REFERENCE:
        mine = [row for row in mine if row["arm"] == REFERENCE]
    medians = [row["median"] for row in mine if row["arm"].startswith(prefix)]
    return float(min(medians, default=0.0))


def rollout(results: Results) -> str:
    """How much faster the rollout with a long tail is as a whole."""
    runs = [row["n"] for row in results["rows"] if row["metric"] == "rollout_s"]
    case, text = _whole(results)
    return (
        f"- A {case} requests with a long tail of lengths {text} "
        f"{runs_of_each_arm(min(runs), max(runs))}"
    )


def turns(results: Results) -> str:
    """How much faster conversations of several turns are."""
    case, text = _whole(results)
    return f"- A rollout of {case}, each of four turns with a tool's output between them, {text}"


def _whole(results: Results) -> tuple[str, str]:
    """The case, and how many times as fast ours is."""
    times = [row for row in results["rows"] if row["metric"] == "rollout_s"]
    ours = next(row for row in times if row["arm"] == OURS)
    return ours["case"], f"is {_faster(times, ours)} ({ours['model']}; {_where(results)})."


def update(results: Results) -> str:
    """How long a full update takes where trainer and engine share a GPU."""
    rows = [row for row in results["rows"] if row["metric"] == "update_wall_ms"]
    parts = []
    for row in rows:
        if (row["arm"], row["case"]) == ("fp8rl", MAPPED):
            same = [r for r in rows if (r["model"], r["arm"]) == (row["model"], REFERENCE)]
            part = f"{row['median']:.1f} ms for {row['model']}"
            if same:
                faster = min(r["median"] for r in same) / row["median"]
                part += f" ({faster:.1f} times as fast as stock BF16's)"
            parts.append(part)
    return f"- A full update takes {' and '.join(parts)}; {_where(results)}."


def _where(results: Results) -> str:
    e = results["environment"]
    return f"{e['device']}, SGLang {e['sglang']}, {e['date']}, commit {e['commit']}"
