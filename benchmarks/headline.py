"""The first figures of the README, a sentence from each of three result files."""

import json
from typing import Any

from benchmarks.performance_tables import REFERENCE, of_runs

OURS = "fp8rl-kv8"
MAPPED = "from BF16, mapped"


def decode(text: str) -> str:
    """How much faster decode steps are, from the least to the most of all loads."""
    content = json.loads(text)
    steps = [row for row in content["rows"] if row["metric"] == "decode_step_ms"]
    rows = [row for row in steps if row["arm"] == OURS]
    ratios = [row["ratios"][f"{REFERENCE}, {row['case']}"] for row in rows]
    best = [_best_stock(steps, row) / row["median"] for row in rows]
    batches, contexts = zip(*(map(int, row["case"].split("x")) for row in rows), strict=True)
    models = " and ".join(dict.fromkeys(row["model"] for row in rows))
    return (
        f"- A decode step is {min(ratios):.2f} to {max(ratios):.2f} times as fast as in BF16, and "
        f"{min(best):.2f} to {max(best):.2f} times as fast as in the best stock arm ({models}, "
        f"{min(batches)} to {max(batches)} sequences, {min(contexts)} to {max(contexts)} tokens of "
        f"context; {_where(content)})."
    )


def _best_stock(steps: list[dict[str, Any]], ours: dict[str, Any]) -> float:
    """The median of the fastest stock arm under the same load."""
    place = ours["model"], ours["case"]
    stock = [row for row in steps if row["arm"].startswith("stock")]
    return float(min(row["median"] for row in stock if (row["model"], row["case"]) == place))


def rollout(text: str) -> str:
    """How much faster the longest rollout is as a whole."""
    content = json.loads(text)
    found = {(row["arm"], row["case"], row["metric"]): row for row in content["rows"]}
    cases = {case for arm, case, metric in found if (arm, metric) == (OURS, "rollout_s")}
    case = max(cases, key=lambda name: int(name.rpartition(" ")[2]))
    time = found[OURS, case, "rollout_s"]
    retracted = [found[arm, case, "retracted_requests"]["median"] for arm in (REFERENCE, OURS)]
    return (
        f"- A {case} requests with a long tail of lengths is "
        f"{time['ratios'][f'{REFERENCE}, {case}']:.2f} times as fast as in BF16: BF16 retracts "
        f"{retracted[0]:.0f} of them, FP8 {retracted[1]:.0f} ({time['model']}; {_where(content)}). "
        f"{of_runs([time])}"
    )


def update(text: str) -> str:
    """How long a full update takes where trainer and engine share a GPU."""
    content = json.loads(text)
    wanted = "fp8rl", MAPPED, "update_wall_ms"
    rows = [r for r in content["rows"] if (r["arm"], r["case"], r["metric"]) == wanted]
    parts = []
    for row in rows:
        stock = [v for name, v in row["ratios"].items() if name.startswith(f"{REFERENCE},")]
        parts.append(
            f"{row['median']:.1f} ms for {row['model']} ({min(stock):.1f} times as fast as stock "
            f"BF16's)"
        )
    return f"- A full update takes {' and '.join(parts)}; {_where(content)}."


def _where(content: dict[str, Any]) -> str:
    e = content["environment"]
    return f"{e['device']}, SGLang {e['sglang']}, {e['date']}, commit {e['commit']}"
