"""Retraction on one rank: who waits in which order, and what SGLang's scheduler is left with."""

from types import SimpleNamespace
from typing import Any

import pytest
import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.control.retraction import fits, refuse_waiting, retract

CLIP, POOL = 4096, 16384


def request(rid: str, prompt: int = 16, output: int = 4, new: int = 64) -> Any:
    """A request with tokens of these numbers, ``new`` of them at most."""
    return SimpleNamespace(
        rid=rid,
        origin_input_ids=[1] * prompt,
        output_ids=[2] * output,
        sampling_params=SimpleNamespace(max_new_tokens=new),
        input_embeds=None,
    )


class FakeScheduler:
    """What ``retract`` uses of SGLang's scheduler."""

    def __init__(self, running: list[Any], waiting: list[Any], page_size: int = 1) -> None:
        self.running, self.waiting_queue = running, waiting
        self.page_size = page_size
        self.max_queued_requests: int | None = 1
        self._engine_paused = False
        self._pending_chunked_abort_req: Any = None
        self.sent: list[Any] = []
        self.flushes = True
        self.grammar_manager = SimpleNamespace(grammar_queue=[])
        self.token_to_kv_pool_allocator = SimpleNamespace(available_size=lambda: POOL)
        tokenizer = SimpleNamespace(send_output=lambda output, request: self.sent.append(output))
        self.ipc_channels = SimpleNamespace(send_to_tokenizer=tokenizer)

    def pause_generation(self, message: Any) -> None:
        assert message.mode == "retract"
        self._engine_paused = True
        for one in self.running:
            limit = self.max_queued_requests
            assert limit is None or len(self.waiting_queue) < limit  # else SGLang would refuse it
            self.waiting_queue.append(one)
        self.running = []

    def continue_generation(self, message: Any) -> None:
        assert not message.torch_empty_cache
        self._engine_paused = False

    def flush_cache(self, empty_cache: bool) -> bool:
        assert not empty_cache
        assert not self.waiting_queue  # else SGLang refuses
        assert not self.grammar_manager.grammar_queue
        return self.flushes

    def abort_request(self, message: Any) -> None:
        assert message.abort_all  # SGLang takes the id of one for a prefix of others
        self.waiting_queue = []

    def rids(self) -> list[str]:
        return [one.rid for one in self.waiting_queue]


def a_scheduler() -> FakeScheduler:
    return FakeScheduler([request("a"), request("b")], [request("c")])


@pytest.fixture(autouse=True)
def clip(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own number, whatever the environment makes of it."""
    monkeypatch.setattr(compat, "CLIP_MAX_NEW_TOKENS", CLIP, raising=False)


def test_what_ran_waits_before_what_waited() -> None:
    scheduler = a_scheduler()
    assert retract(scheduler)
    assert scheduler.rids() == ["a", "b", "c"]
    assert scheduler.sent == []
    assert scheduler.max_queued_requests == 1
    assert not scheduler._engine_paused


def test_a_paused_engine_stays_paused() -> None:
    scheduler = a_scheduler()
    scheduler._engine_paused = True
    assert retract(scheduler)
    assert scheduler._engine_paused


def test_what_waits_for_its_grammar_goes_on_waiting() -> None:
    scheduler = a_scheduler()
    compiling = [request("d")]
    scheduler.grammar_manager.grammar_queue = compiling
    assert retract(scheduler)
    assert scheduler.grammar_manager.grammar_queue is compiling
    assert scheduler.rids() == ["a", "b", "c"]
    assert scheduler.sent == []


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
    scheduler = FakeScheduler([], [], page_size)
    assert fits(scheduler, request("r", prompt, output, new)) is admitted


def test_embeddings_do_not_go_on() -> None:
    """SGLang would throw their output away, which the client has seen."""
    embedded = request("r")
    assert fits(FakeScheduler([], []), embedded)
    embedded.input_embeds = [[0.0]]
    assert not fits(FakeScheduler([], []), embedded)
