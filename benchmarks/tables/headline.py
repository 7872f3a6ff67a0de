"""The first figures of the README, a sentence from each of three result files."""

from collections.abc import Mapping
from typing import Any

from benchmarks.tables.engines import REFERENCE
from benchmarks.tables.markdown import Row, runs_of_each_arm

OURS = "fp8rl-kv8"
MAPPED = "from BF16, mapped"


Results = Mapping[str, Any]


def decode(results: Results) -> str:
    """How much faster decode steps are, from the least to the most of all loads."""
    steps = [row for row in results["rows"] if row["metric"] == "decode_step_ms"]
    rows = [row for row in steps if row["arm"] == OURS]
    ratios = [_best(steps, row, REFERENCE) / row["median"] for row in rows]
    stock = [_best(steps, row, "stock") / row["median"] for row in rows]
    batches, contexts = zip(*(map(int, row["case"].split("x")) for row in rows), strict=True)
    models = " and ".join(dict.fromkeys(row["model"] for row in rows))
    return (
        f"- A decode step is {min(ratios):.2f} to {max(ratios):.2f} times as fast as in BF16, and "
        f"{min(stock):.2f} to {max(stock):.2f} times as fast as in the best stock arm ({models}, "
        f"{min(batches)} to {max(batches)} sequences, {min(contexts)} to {max(contexts)} tokens of "
        f"context; {_where(results)})."
    )


def _best(rows: list[Row], ours: Row, prefix: str) -> float:
    """The least median of arms whose name begins so, under the same load."""
    place = ours["model"], ours["case"]
    mine = [row for row in rows if (row["model"], row["case"]) == place]
    if prefix == REFERENCE:
        mine = [row for row in mine if row["arm"] == REFERENCE]
    return float(min(row["median"] for row in mine if row["arm"].startswith(prefix)))


def rollout(results: Results) -> str:
    """How much faster the longest rollout is as a whole."""
    found = {(row["arm"], row["case"], row["metric"]): row for row in results["rows"]}
    cases = {case for arm, case, metric in found if (arm, metric) == (OURS, "rollout_s")}
    case = max(cases, key=lambda name: int(name.rpartition(" ")[2]))
    time, reference = found[OURS, case, "rollout_s"], found[REFERENCE, case, "rollout_s"]
    retracted = [found[arm, case, "retracted_requests"]["median"] for arm in (REFERENCE, OURS)]
    return (
        f"- A {case} requests with a long tail of lengths is "
        f"{reference['median'] / time['median']:.2f} times as fast as in BF16: BF16 retracts "
        f"{retracted[0]:.0f} of them, FP8 {retracted[1]:.0f} ({time['model']}; "
        f"{_where(results)}). {runs_of_each_arm(time['n'])}"
    )


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
