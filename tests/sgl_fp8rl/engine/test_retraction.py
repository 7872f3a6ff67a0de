"""Retraction on one rank: who waits in which order, and what SGLang's scheduler is left with."""

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.control.retraction import fits, refuse_waiting, retract
from tests.sgl_fp8rl.engine.fake_scheduler import POOL, FakeScheduler

CLIP = 4096


def request(rid: str, prompt: int = 16, output: int = 4, new: int = 64) -> Any:
    """A request with tokens of these numbers, ``new`` of them at most."""
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=[1] * prompt,
        output_ids=[2] * output,
        sampling_params=SimpleNamespace(max_new_tokens=new),
        input_embeds=None,
    )


def a_scheduler() -> FakeScheduler:
    return FakeScheduler([request("a"), request("b")], [request("c")])


@pytest.fixture(autouse=True)
def clip(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own number, whatever the environment makes of it."""
    monkeypatch.setattr(compat, "CLIP_MAX_NEW_TOKENS", CLIP, raising=False)


@pytest.mark.parametrize("paused", [False, True])
def test_what_ran_waits_before_what_waited(paused: bool) -> None:
    """What waits for its grammar goes on waiting for it, and a paused engine stays paused."""
    scheduler = a_scheduler()
    scheduler._engine_paused = paused
    compiling = scheduler.grammar_manager.grammar_queue = [request("d")]
    assert retract(scheduler)
    assert scheduler.rids() == ["a", "b", "c"]
    assert scheduler.grammar_manager.grammar_queue is compiling
    assert scheduler.sent == []
    assert scheduler.max_queued_requests == 1
    assert scheduler._engine_paused is paused


def test_all_that_wait_are_refused() -> None:
    """What waits for its grammar too: SGLang would end it by a prefill under these weights."""
    scheduler = FakeScheduler([], [request("a")])
    scheduler.grammar_manager.grammar_queue = [request("b")]
    refuse_waiting(scheduler, "no", 503)
    assert [refusal.rid for refusal in scheduler.sent] == ["a", "b"]
    assert (scheduler.waiting_queue, scheduler.grammar_manager.grammar_queue) == ([], [])


def test_a_cache_that_is_not_reset_is_told() -> None:
    scheduler = a_scheduler()
    scheduler.running.append(request("too long", POOL))
    scheduler.flushes = False
    assert not retract(scheduler)
    assert scheduler.rids() == ["a", "b", "too long", "c"]
    assert scheduler.sent == []
    assert not scheduler._engine_paused


def test_what_would_wait_for_ever_is_answered() -> None:
    scheduler = a_scheduler()
    scheduler.running.append(request("too long", POOL))
    scheduler.waiting_queue.append(request("waited", POOL))  # SGLang may refuse it, not we
    assert retract(scheduler)
    assert scheduler.rids() == ["a", "b", "c", "waited"]
    (refusal,) = scheduler.sent
    assert refusal.rid == "too long"
    assert refusal.finished_reason["type"] == "abort"
    assert "status_code" not in refusal.finished_reason  # or its tokens would be an error
    assert "KV cache" in refusal.finished_reason["message"]


def test_an_abort_that_was_put_off_is_not_lost() -> None:
    scheduler = a_scheduler()
    scheduler._pending_chunked_abort_req = scheduler.running[1]
    assert retract(scheduler)
    assert scheduler.rids() == ["a", "c"]
    assert scheduler._pending_chunked_abort_req is None


@pytest.mark.parametrize(
    ("page_size", "prompt", "output", "new", "admitted"),
    [
        (1, POOL - 5000, 100, 4997, True),
        (1, POOL - 5000, 100, 4999, True),  # what SGLang reserves of the rest is bounded
        (1, POOL - 5000, 3000, 4998, True),
        (1, POOL - 5000, 3000, 4999, False),
        (64, POOL - 5000, 100, 4900, True),
        (64, POOL - 5000, 3000, 4900, True),
        (64, POOL - 5000, 3000, 4960, False),  # it was admitted with an output of 100 tokens
        (64, POOL - 5000, 100, 4960, True),
        (64, POOL - 200, 0, 137, False),
    ],
)
def test_what_fits(page_size: int, prompt: int, output: int, new: int, admitted: bool) -> None:
    scheduler = FakeScheduler(page_size=page_size)
    assert fits(scheduler, request("r", prompt, output, new)) is admitted


def test_embeddings_do_not_go_on() -> None:
    """SGLang would throw their output away, which the client has seen."""
    embedded = request("r")
    assert fits(FakeScheduler(), embedded)
    embedded.input_embeds = [[0.0]]
    assert not fits(FakeScheduler(), embedded)
