"""The README's first figures, from result files."""

from typing import Any

from benchmarks.tables import headline

ENVIRONMENT = {
    "device": "NVIDIA H200",
    "sglang": "0.5.17",
    "date": "2026-11-22",
    "commit": "abc1234",
}


def row(arm: str, case: str, metric: str, median: float) -> dict[str, Any]:
    common = {"model": "qwen3-8b", "arm": arm, "case": case, "metric": metric, "n": 1}
    return common | {"median": median}


def test_decode_is_compared_with_bf16_and_the_best_of_stock() -> None:
    steps = {"stock-bf16": 10.0, "stock-a": 7.0, "stock-b": 8.0, "fp8rl": 1.0, "fp8rl-kv8": 5.0}
    rows = [row(arm, "128x512", "decode_step_ms", median) for arm, median in steps.items()]
    found = headline.decode({"environment": ENVIRONMENT, "rows": rows})
    assert "is 2.00 times as fast as in BF16, and 1.40 times as fast as in the best stock" in found
    assert "128 sequences, 512 tokens" in found


def test_an_update_is_compared_with_the_fastest_stock_one() -> None:
    rows = [
        row("stock-bf16", "small", "update_wall_ms", 50.0),
        row("stock-bf16", "big", "update_wall_ms", 30.0),
        row("stock-block-fp8", "big", "update_wall_ms", 1.0),
        row("fp8rl", "from BF16, mapped", "update_wall_ms", 12.0),
        row("fp8rl", "from BF16, bucket", "update_wall_ms", 99.0),
    ]
    found = headline.update({"environment": ENVIRONMENT, "rows": rows})
    assert "12.0 ms" in found and "2.5 times" in found and "99" not in found
