"""The README's first figures, from result files."""

import json
from typing import Any

import pytest

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


def test_decode_is_the_range_over_all_loads() -> None:
    rows = [
        row(arm, case, "decode_step_ms", median)
        for arm, case, median in (
            ("stock-bf16", "128x512", 10.0),
            ("stock-bf16", "16x30000", 12.0),
            ("stock-fp8", "128x512", 7.0),
            ("stock-fp8", "16x30000", 10.0),
            ("fp8rl", "128x512", 1.0),
            ("fp8rl-kv8", "128x512", 5.0),
            ("fp8rl-kv8", "16x30000", 8.0),
        )
    ]
    found = headline.decode({"environment": ENVIRONMENT, "rows": rows})
    assert "is 1.50 to 2.00 times as fast as in BF16, and 1.25 to 1.40 times" in found
    assert "16 to 128 sequences, 512 to 30000 tokens" in found


def test_an_update_is_compared_with_the_fastest_stock_one() -> None:
    rows = [
        row("stock-bf16", "small", "update_wall_ms", 50.0),
        row("stock-bf16", "big", "update_wall_ms", 30.0),
        row("stock-flash-rl", "big", "update_wall_ms", 1.0),
        row("fp8rl", "from BF16, mapped", "update_wall_ms", 12.0),
        row("fp8rl", "from BF16, bucket", "update_wall_ms", 99.0),
    ]
    found = headline.update({"environment": ENVIRONMENT, "rows": rows})
    assert found.startswith(
        "- A full update takes 12.0 ms for qwen3-8b (2.5 times as fast as stock BF16's); NVIDIA"
    )


LEARNT = {"versions": {"sglang": "0.5.17"}, "parameters": {"dense": 2e6, "moe": 3e6}}


@pytest.mark.parametrize(
    ("less", "seeds", "verdict"),
    [
        (0.001, 3, "; the same within 0.05 (TOST, largest p < 0.001, pairs of seeds: 3;"),
        (0.06, 3, "not shown to be the same within 0.05 (TOST, largest p = "),
        (
            0.001,
            1,
            "not shown to be the same within 0.05 (TOST, largest p = 1.000, pairs of seeds: 1;",
        ),
    ],
)
def test_learning_says_same_only_where_a_test_does(less: float, seeds: int, verdict: str) -> None:
    rewards = {"bf16": 0.9, "fp8": 0.9, "fp8-kv8": 0.9 - less, "moe-bf16": 0.8, "moe-fp8": 0.8}
    rows: list[Any] = [{"kind": "environment", **ENVIRONMENT, **LEARNT}]
    rows += [
        {"kind": "run", "arm": arm, "seed": seed, "judged": {"reward": reward + 0.0015 * noise}}
        for arm, reward in rewards.items()
        for seed, noise in zip(range(seeds), (0, 1, 1), strict=False)
    ]
    told = headline.learning("\n".join(map(json.dumps, rows)))
    more = 0.001 if seeds == 3 else 0.0  # the mean of the noise
    assert (
        f"{0.9 - less + more:.3f} beside {0.9 + more:.3f} (with FP8 KV, 2 M parameters), " in told
    )
    assert verdict in told
