"""The best stock arm is found for each load and each metric by itself."""

from typing import Any

from benchmarks.tables import beside_stock

ENVIRONMENT = {"device": "a GPU", "date": "2026-01-01", "commit": "abc"}
MEASURED = {
    "stock-bf16": {"decode_step_ms": 10.0, "prefill_s": 4.0},
    "stock-a": {"decode_step_ms": 8.0, "prefill_s": 5.0},
    "stock-b": {"decode_step_ms": 9.0, "prefill_s": 3.0},
    "fp8rl": {"decode_step_ms": 7.0, "prefill_s": 2.0},
    "fp8rl-kv8": {"decode_step_ms": 5.0, "prefill_s": 2.5},
}


def rows(case: str, swap: bool) -> list[dict[str, Any]]:
    other = {"stock-a": "stock-b", "stock-b": "stock-a"} if swap else {}
    return [
        {"model": "m", "case": case, "arm": other.get(arm, arm), "metric": metric, "median": value}
        for arm, metrics in MEASURED.items()
        for metric, value in metrics.items()
    ]


def test_each_load_has_its_best_arm() -> None:
    results = {"environment": ENVIRONMENT, "rows": rows("1x1", False) + rows("2x2", True)}
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in beside_stock.both(results).splitlines()
        if line.startswith("| m, ")
    ]
    assert cells == [
        ["m, 1x1", "10.00 ms", "8.00 ms (stock-a), 1.25x", "5.00 ms (fp8rl-kv8), 2.00x"],
        ["m, 2x2", "10.00 ms", "8.00 ms (stock-b), 1.25x", "5.00 ms (fp8rl-kv8), 2.00x"],
        ["m, 1x1", "4 s", "3 s (stock-b), 1.33x", "2 s (fp8rl), 2.00x"],
        ["m, 2x2", "4 s", "3 s (stock-a), 1.33x", "2 s (fp8rl), 2.00x"],
    ]
