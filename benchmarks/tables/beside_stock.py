"""The measured blocks that compare ours with the best stock arm, a line a load."""

from collections.abc import Sequence

from benchmarks.tables.engines import REFERENCE, Results, is_reference
from benchmarks.tables.markdown import Column, Form, Row, facts, joined, table, with_ratio

DECODE = ("decode_step_ms", "{median:.2f} ms", "decode step, sequences x prompt")
PREFILL = ("prefill_s", "{median:.3g} s", "prefill of all prompts")


def both(results: Results) -> str:
    """Decode steps and prefills."""
    tables = [_compared(results, *what) for what in (DECODE, PREFILL)]
    return joined(*tables, _source(results))


def _compared(results: Results, metric: str, form: str, head: str) -> str:
    """Stock BF16, the best of stock's other arms, and the best of ours."""
    rows = with_ratio(results["rows"], metric, is_reference)
    stock = [row for row in rows if row["arm"].startswith("stock") and not is_reference(row)]
    ours = [row for row in rows if row["arm"].startswith("fp8rl")]
    sides = {
        REFERENCE: list(filter(is_reference, rows)),
        "stock": _fastest(stock, metric),
        "ours": _fastest(ours, metric),
    }
    named: dict[str, Form] = {metric: form + " ({arm})"}
    faster: dict[str, Form] = {"faster": "{median:.2f}x"}
    columns = [
        Column(REFERENCE, {metric: form}, {"side": REFERENCE}),
        Column("best other stock arm", named | faster, {"side": "stock"}),
        Column("ours", named | faster, {"side": "ours"}),
    ]
    best = [row | {"side": side} for side, found in sides.items() for row in found]
    return table(best, ["model", "case"], columns, head)


def decode(results: Results) -> str:
    """Decode steps of every arm, BF16 first and ours last."""
    rows = with_ratio(results["rows"], DECODE[0], is_reference)
    arms = dict.fromkeys(sorted((row["arm"] for row in rows), key=_place))
    form: dict[str, Form] = {DECODE[0]: DECODE[1]}
    faster: dict[str, Form] = {"faster": "{median:.2f}x"}
    columns = [
        Column(arm, form if arm == REFERENCE else form | faster, {"arm": arm}) for arm in arms
    ]
    return joined(table(rows, ["model", "case"], columns, DECODE[2]), _source(results))


def _place(arm: str) -> int:
    return 0 if arm == REFERENCE else 1 if arm.startswith("stock") else 2


def _fastest(rows: Sequence[Row], metric: str) -> list[Row]:
    """For each model and case, the rows of the arm that takes the least time."""
    slowest_first = sorted(
        (row for row in rows if row["metric"] == metric), key=lambda row: -row["median"]
    )
    arms = {(row["model"], row["case"]): row["arm"] for row in slowest_first}
    return [row for row in rows if arms.get((row["model"], row["case"])) == row["arm"]]


def _source(results: Results) -> str:
    return f"{facts(results['environment'])}: medians."
