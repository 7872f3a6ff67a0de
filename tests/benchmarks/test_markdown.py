"""Tables from rows."""

from typing import Any

import pytest

from benchmarks.tables.markdown import Column, table, with_ratio, with_share


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


def test_a_ratio_is_to_the_best_reference() -> None:
    rows = with_ratio(ROWS, "step_ms", lambda row: bool(row["arm"] == "stock"), same=["model"])
    assert [r["median"] for r in rows if r["metric"] == "faster"] == [6.0 / 5.0]


def test_a_cell_of_several_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rows of step_ms in one cell of time"):
        table(ROWS, ["arm"], [Column("time", {"step_ms": "{median}"})], "arm")
