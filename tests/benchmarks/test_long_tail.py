"""The rollout with a long tail of lengths: what is sent, and what the scheduler's log says."""

from statistics import median

import pytest

from benchmarks import long_tail

LOG = """Decode batch, #running-req: 9, #token: 90, token usage: 0.11, cuda graph: True
the rollout begins
Decode batch, #running-req: 100, #token: 900, token usage: 0.90, cuda graph: True, gen
KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: 5
Decode batch, #running-req: 50, #token: 500, token usage: 0.50, cuda graph: True, gen
"""


def test_lengths_are_seeded_and_have_a_long_tail() -> None:
    lengths = long_tail.output_lengths(20_000)
    assert lengths[:512] == long_tail.output_lengths(512)
    assert median(lengths) == pytest.approx(long_tail.MEDIAN, rel=0.03)
    assert max(lengths) == long_tail.CAP and min(lengths) >= 1
    mean = sum(lengths) / len(lengths)
    assert 1300 < mean < 1375  # 1338: the median of a lognormal is below its mean


def test_peak_by_hand() -> None:
    # all three at 10 tokens, then two at 20, then one at 100
    assert long_tail.peak_tokens([10, 20, 100]) == 3 * (256 + 10)
    assert long_tail.peak_tokens([10, 5000]) == 256 + 5000


def test_demand_is_more_than_bf16_may_hold() -> None:
    lengths = long_tail.output_lengths(512)
    share = long_tail.pool_share(lengths, 780_000)
    assert share < 1.0
    assert long_tail.peak_tokens(lengths) / (share * 780_000) == pytest.approx(long_tail.DEMAND)
    assert long_tail.pool_share(long_tail.output_lengths(4096), 780_000) == 1.0  # even more


def test_usage_is_that_of_the_rollout() -> None:
    assert long_tail.usage(LOG) == {"running_requests": [75.0]}
    with pytest.raises(ValueError, match="no line of a decode"):
        long_tail.usage(LOG.partition(long_tail.BEGINS)[0])
