"""The README's first figures, from result files."""

import json
from typing import Any

from benchmarks import headline

ENVIRONMENT = {
    "device": "NVIDIA H200",
    "sglang": "0.5.17",
    "date": "2026-11-22",
    "commit": "abc1234",
}


def content(*rows: dict[str, Any]) -> str:
    return json.dumps({"environment": ENVIRONMENT, "rows": rows})


def row(arm: str, case: str, metric: str, median: float, ratio: float | None = None) -> Any:
    ratios = {} if ratio is None else {f"stock-bf16, {case}": ratio, f"fp8rl, {case}": 9.0}
    common = {"arm": arm, "case": case, "metric": metric, "median": median, "n": 1}
    return {"model": "qwen3-8b", **common, "ratios": ratios}


def test_decode_is_the_range_over_all_loads() -> None:
    text = content(
        row("stock-bf16", "128x512", "decode_step_ms", 10.0),
        row("stock-fp8", "128x512", "decode_step_ms", 7.0),
        row("stock-fp8", "16x30000", "decode_step_ms", 10.0),
        row("fp8rl", "128x512", "decode_step_ms", 8.0, 1.25),
        row("fp8rl-kv8", "128x512", "decode_step_ms", 5.0, 2.0),
        row("fp8rl-kv8", "16x30000", "decode_step_ms", 8.0, 1.5),
        row("fp8rl-kv8", "16x30000", "prefill_s", 8.0, 1.0),
    )
    told = headline.decode(text)
    facts = (
        "1.50 to 2.00 times as fast as in BF16",
        "1.25 to 1.40 times as fast as in the best stock",
    )
    facts += ("qwen3-8b", "16 to 128 sequences", "512 to 30000 tokens")
    for fact in (*facts, *ENVIRONMENT.values()):
        assert fact in told


def test_rollout_is_the_longest() -> None:
    rows = [
        row(arm, f"rollout of {count}", metric, value, ratio)
        for count, ratio in ((64, 3.0), (512, 2.0))
        for arm, metric, value, ratio in (
            ("stock-bf16", "rollout_s", 9.0, None),
            ("stock-bf16", "retracted_requests", 7.0, None),
            ("fp8rl-kv8", "rollout_s", 5.0, ratio),
            ("fp8rl-kv8", "retracted_requests", 1.0, None),
        )
    ]
    told = headline.rollout(content(*rows))
    assert told.startswith("- A rollout of 512 requests with a long tail of lengths is 2.00 times")
    assert "BF16 retracts 7 of them, FP8 1 (" in told and told.endswith("One run an arm.")


def test_update_is_beside_the_fastest_stock_one() -> None:
    mine = row("fp8rl", "from BF16, mapped", "update_wall_ms", 12.34)
    mine["ratios"] = {"stock-bf16, 1": 3.0, "stock-bf16, 2": 2.5, "stock-flash-rl, 1": 1.0}
    other = row("fp8rl", "from BF16, bucket", "update_wall_ms", 99.0)
    assert headline.update(content(mine, other)).startswith(
        "- A full update takes 12.3 ms for qwen3-8b (2.5 times as fast as stock BF16's); NVIDIA"
    )
