"""Tables and sentences from rows."""

from typing import Any

import pytest

from benchmarks.tables import beside_stock, headline
from benchmarks.tables.markdown import Column, table, with_ratio, with_share

FACTS = {"device": "a GPU", "sglang": "0.5.17", "date": "2026-01-01", "commit": "abc1234"}
STEP, PREFILL = "decode_step_ms", "prefill_s"


def row(arm: str, case: str, metric: str, median: float) -> dict[str, Any]:
    return {"model": "m", "arm": arm, "case": case, "metric": metric, "median": median, "n": 1}


def is_stock(row: dict[str, Any]) -> bool:
    return bool(row["arm"] == "stock")


ROWS = [
    row("stock", "a", "step_ms", 8.0),
    row("stock", "a", "floor_ms", 4.0),
    row("stock", "b", "step_ms", 6.0),
    row("ours", "a", "step_ms", 5.0),
    row("ours", "a", "floor_ms", 4.0),
    row("new", "b", "other", 1.0),
]


def test_a_cell_has_the_metrics_that_are_there() -> None:
    rows = with_share(with_ratio(ROWS, "step_ms", is_stock), "floor_ms", "step_ms", "of floor")
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


def test_a_ratio_is_to_the_best_reference() -> None:
    rows = with_ratio(ROWS, "step_ms", is_stock, same=["model"])
    assert [r["median"] for r in rows if r["metric"] == "faster"] == [6.0 / 5.0]


MEASURED = {
    "stock-bf16": (10.0, 4.0),
    "stock-a": (8.0, 5.0),
    "stock-b": (9.0, 3.0),
    "fp8rl": (7.0, 2.0),
    "fp8rl-kv8": (5.0, 2.5),
}
"""Step and prefill of each arm."""


def engines(case: str, swap: bool = False) -> list[dict[str, Any]]:
    other = {"stock-a": "stock-b", "stock-b": "stock-a"} if swap else {}
    return [
        row(other.get(arm, arm), case, metric, value)
        for arm, values in MEASURED.items()
        for metric, value in zip((STEP, PREFILL), values, strict=True)
    ]


def test_each_load_and_metric_has_its_best_stock_arm() -> None:
    results = {"environment": FACTS, "rows": engines("1x1") + engines("2x2", swap=True)}
    lines = beside_stock.both(results).splitlines()
    assert [line for line in lines if line.startswith("| m, ")] == [
        "| m, 1x1 | 10.00 ms | 8.00 ms (stock-a), 1.25x | 5.00 ms (fp8rl-kv8), 2.00x |",
        "| m, 2x2 | 10.00 ms | 8.00 ms (stock-b), 1.25x | 5.00 ms (fp8rl-kv8), 2.00x |",
        "| m, 1x1 | 4 s | 3 s (stock-b), 1.33x | 2 s (fp8rl), 2.00x |",
        "| m, 2x2 | 4 s | 3 s (stock-a), 1.33x | 2 s (fp8rl), 2.00x |",
    ]


def test_the_first_figures_of_the_readme() -> None:
    found = headline.decode({"environment": FACTS, "rows": engines("128x512")})
    assert "is 2.00 times as fast as in BF16, and 1.60 times as fast as in the best stock" in found
    assert "128 sequences, 512 tokens" in found
    rows = [
        row(arm, case, "update_wall_ms", median)
        for arm, case, median in (
            ("stock-bf16", "small", 50.0),
            ("stock-bf16", "big", 30.0),
            ("stock-block-fp8", "big", 1.0),
            ("fp8rl", "from BF16, mapped", 12.0),
            ("fp8rl", "from BF16, bucket", 99.0),
        )
    ]
    found = headline.update({"environment": FACTS, "rows": rows})
    assert "12.0 ms" in found and "2.5 times" in found and "99" not in found
