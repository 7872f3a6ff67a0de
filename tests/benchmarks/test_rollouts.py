"""Whole rollouts: a long tail of lengths, and conversations of several turns."""

import asyncio
import itertools
from typing import Any

import pytest

from benchmarks import long_tail, multi_turn


def test_demand_is_more_than_bf16_may_hold() -> None:
    # all three at 10 tokens, then two at 20, then one at 100
    assert long_tail.peak_tokens([10, 20, 100]) == 3 * (256 + 10)
    assert long_tail.peak_tokens([10, 5000]) == 256 + 5000
    lengths = long_tail.output_lengths(512)
    share = long_tail.pool_share(lengths, 780_000)
    assert share < 1.0
    assert long_tail.peak_tokens(lengths) / (share * 780_000) == pytest.approx(long_tail.DEMAND)
    assert long_tail.pool_share(long_tail.output_lengths(4096), 780_000) == 1.0  # even more


def test_usage_is_that_of_the_rollout() -> None:
    line = "Decode batch, #running-req: {}, #token: 90, token usage: 0.11, cuda graph: True, gen\n"
    log = f"{line.format(9)}{long_tail.BEGINS}\n{line.format(100)}KV cache pool is full.\n"
    assert long_tail.usage(log + line.format(50)) == {"running_requests": [75.0]}
    with pytest.raises(ValueError, match="no line of a decode"):
        long_tail.usage(line.format(9))


class FakeEngine:
    """Answers with numbers of its own; the first tokens that it has seen are cached."""

    def __init__(self, answer: int = multi_turn.ANSWER) -> None:
        self.answer = answer
        self.sent: list[list[int]] = []
        self.running = self.most = 0

    async def async_generate(self, input_ids: list[int], **_: Any) -> dict[str, Any]:
        self.sent.append(input_ids)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        logprobs = [(-1.0, 7_000_000 + len(self.sent), None)] * self.answer
        return {"meta_info": {"output_token_logprobs": logprobs}}


def test_a_turn_sends_all_that_was_said_before() -> None:
    engine, work = FakeEngine(), multi_turn.conversations(1, 3, 4096)
    metas = asyncio.run(multi_turn.rollout_of(engine, work))
    assert len(metas) == len(engine.sent) == 3 * multi_turn.TURNS
    assert engine.most == 3, "conversations run side by side"
    mine = [sent for sent in engine.sent if sent[: multi_turn.PROMPT] == work[1][0]]
    assert [len(sent) for sent in mine] == [
        multi_turn.PROMPT + turn * (multi_turn.ANSWER + multi_turn.TOOL)
        for turn in range(multi_turn.TURNS)
    ]
    for turn, (before, after) in enumerate(itertools.pairwise(mine), start=1):
        assert after[: len(before)] == before, "the prefix is what the cache holds"
        assert after[len(before)] >= 7_000_000, "control: the engine's answer, not the tool's"
        assert after[-multi_turn.TOOL :] == work[1][turn]
    assert len(mine[-1]) == multi_turn.LONGEST


def test_a_short_answer_is_an_error() -> None:
    engine = FakeEngine(answer=multi_turn.ANSWER - 1)
    with pytest.raises(RuntimeError, match="511"):
        asyncio.run(multi_turn.rollout_of(engine, multi_turn.conversations(1, 1, 4096)))
