"""Tables from rows; ``test_readme`` holds what each block of the pages makes of its results."""

from typing import Any

import pytest

from benchmarks.tables import beside_stock
from benchmarks.tables.markdown import Column, table, with_ratio, with_share

FACTS = {"device": "a GPU", "date": "2026-01-01", "commit": "abc1234"}
STEP, PREFILL = "decode_step_ms", "prefill_s"


def row(arm: str, case: str, metric: str, median: float) -> dict[str, Any]:
    return {"model": "m", "arm": arm, "case": case, "metric": metric, "median": median}


ROWS = [
    row("stock", "a", "step_ms", 8.0),
    row("stock", "a", "floor_ms", 4.0),
    row("stock", "b", "step_ms", 6.0),
    row("ours", "a", "step_ms", 5.0),
    row("ours", "a", "floor_ms", 4.0),
    row("new", "b", "other", 1.0),
]


def test_a_cell_has_the_metrics_that_are_there() -> None:
    rows = with_ratio(ROWS, "step_ms", lambda row: bool(row["arm"] == "stock"))
    rows = with_share(rows, "floor_ms", "step_ms", "of floor")
    metrics = {"step_ms": "{median:.1f}", "faster": lambda r: f"{r['median']:.2f}x"}
    metrics |= {"of floor": "{median:.0%}"}
    columns = [Column(case, metrics, {"case": case}) for case in "ab"]
    assert table(rows, ["arm"], columns, "arm").splitlines() == [
        "| arm | a | b |",
        "| --- | --- | --- |",
        "| stock | 8.0, 50% | 6.0 |",
        "| ours | 5.0, 1.60x, 80% |  |",
    ]
    assert table(rows, ["arm"], [Column("c", metrics, {"case": "c"})], "arm") == ""
    with pytest.raises(ValueError, match="2 rows of step_ms in one cell of time"):
        table(ROWS, ["arm"], [Column("time", {"step_ms": "{median}"})], "arm")


def test_each_load_and_metric_has_its_best_stock_arm() -> None:
    of_a, of_b = (8.0, 5.0), (9.0, 3.0)
    rows = [
        row(arm, case, metric, value)
        for case, swapped in (("1x1", (of_a, of_b)), ("2x2", (of_b, of_a)))
        for arm, values in (
            ("stock-bf16", (10.0, 4.0)),
            *zip(("stock-a", "stock-b"), swapped, strict=True),
            ("fp8rl", (7.0, 2.0)),
            ("fp8rl-kv8", (5.0, 2.5)),
        )
        for metric, value in zip((STEP, PREFILL), values, strict=True)
    ]
    lines = beside_stock.both({"environment": FACTS, "rows": rows}).splitlines()
    assert [line for line in lines if line.startswith("| m, ")] == [
        "| m, 1x1 | 10.00 ms | 8.00 ms (stock-a), 1.25x | 5.00 ms (fp8rl-kv8), 2.00x |",
        "| m, 2x2 | 10.00 ms | 8.00 ms (stock-b), 1.25x | 5.00 ms (fp8rl-kv8), 2.00x |",
        "| m, 1x1 | 4 s | 3 s (stock-b), 1.33x | 2 s (fp8rl), 2.00x |",
        "| m, 2x2 | 4 s | 3 s (stock-a), 1.33x | 2 s (fp8rl), 2.00x |",
    ]
