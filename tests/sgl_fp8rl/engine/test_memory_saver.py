"""Memory that SGLang released: nothing runs on it, and weights hold no version until an update."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.io_struct import (
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from torch import nn

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.control import guards, memory_release
from sgl_fp8rl.engine.control.attached import attach
from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from tests.sgl_fp8rl.engine.fake_scheduler import FakeScheduler

ALL = ["kv_cache", "weights", "cuda_graph"]


class Updater:
    """SGLang's releases and resumes, with what they end themselves over."""

    def __init__(self, model: nn.Module) -> None:
        self.scheduler = FakeScheduler()
        self.scheduler.serve(model)
        self.tp_worker = self.scheduler.tp_worker
        self.offload_tags: set[str] = set()
        self.calls: list[tuple[str, list[str]]] = []

    def release(self, request: Any) -> str:
        assert self.scheduler.is_fully_idle(), "SGLang ends itself"
        assert not self.offload_tags & set(request.tags), "it is away already"
        self.offload_tags |= set(request.tags)
        self.calls.append(("release", request.tags))
        return "released"

    def resume(self, request: Any) -> str:
        for tag in request.tags:
            self.offload_tags.remove(tag)
        self.calls.append(("resume", request.tags))
        return "resumed"


@pytest.fixture
def weights() -> EngineWeights:
    """They serve."""
    weights = EngineWeights(nn.Linear(2, 2), torch.bfloat16)
    weights.state = State.SERVING
    attach(weights.model, weights)
    return weights


@pytest.fixture
def updater(weights: EngineWeights) -> Updater:
    return Updater(weights.model)


RELEASE, RESUME = ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput
Request = ReleaseMemoryOccupationReqInput | ResumeMemoryOccupationReqInput


def ask(updater: Updater, request: Request) -> Any:
    if isinstance(request, RELEASE):
        return memory_release.release(Updater.release, updater, request)
    return memory_release.resume(Updater.resume, updater, request)


def release(updater: Updater, *tags: str) -> Any:
    return ask(updater, RELEASE(tags=list(tags)))


def resume(updater: Updater, *tags: str) -> Any:
    return ask(updater, RESUME(tags=list(tags)))


def test_released_weights_are_quarantined_until_an_update(
    weights: EngineWeights, updater: Updater
) -> None:
    assert release(updater, "kv_cache") == "released"
    assert weights.state is State.SERVING
    release(updater, "weights")
    assert weights.state is State.QUARANTINED

    with pytest.raises(ManifestError, match="resume_memory_occupation"):
        weights.check_policy(Policy("any", 0))
    assert resume(updater, "weights") == "resumed"
    assert weights.state is State.QUARANTINED
    assert not weights.released
    weights.check_policy(Policy("any", 0))


def test_only_what_is_there_is_released_and_what_is_away_resumed(updater: Updater) -> None:
    release(updater, "kv_cache")
    release(updater)  # all
    assert isinstance(release(updater), compat.ReleaseMemoryOccupationReqOutput)
    resume(updater, "weights")
    resume(updater)
    assert isinstance(resume(updater, *ALL), compat.ResumeMemoryOccupationReqOutput)
    assert sorted(compat.GPU_MEMORY_ALL_TYPES) == sorted(ALL)
    assert [(what, sorted(tags)) for what, tags in updater.calls] == [
        ("release", ["kv_cache"]),
        ("release", ["cuda_graph", "weights"]),
        ("resume", ["weights"]),
        ("resume", ["cuda_graph", "kv_cache"]),
    ]
    assert not updater.offload_tags


def test_memory_is_unmapped_when_the_gpu_has_done_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    device = SimpleNamespace(synchronize=lambda: done.append("waited"))
    monkeypatch.setattr(torch, "get_device_module", lambda: device)

    class Adapter:
        def pause(self, tag: str) -> None:
            done.append(tag)

    memory_release.unmap_unused(Adapter.pause, Adapter(), "weights")
    assert done == ["waited", "weights"]


@pytest.mark.guarantee("released", fault="a request while the KV cache is released")
def test_nothing_generates_on_released_memory(updater: Updater) -> None:
    scheduler, served = updater.scheduler, list[Any]()
    request = SimpleNamespace(rid="r", input_ids=[1, 2], mm_inputs=None)

    def ask() -> None:
        guards.refuse_generation(lambda _, asked: served.append(asked), scheduler, request)

    ask()
    release(updater, "kv_cache")
    ask()
    (refusal,) = scheduler.sent
    why = refusal.finished_reason["message"]
    assert "kv_cache" in why and "resume_memory_occupation" in why
    assert refusal.finished_reason["status_code"] == 503
    resume(updater, "kv_cache")
    ask()
    assert len(served) == 2 and len(scheduler.sent) == 1


def step(updater: Updater, *asked: Request) -> list[Any]:
    """The answers of one step of the scheduler's loop, ``None`` for what waits."""

    def process(_: Any, due: list[Request]) -> list[Any]:
        return [ask(updater, each) for each in due]

    return guards.on_scheduler_step(process, updater.scheduler, list(asked))  # type: ignore[no-any-return]


def test_a_release_waits_until_nothing_runs_and_a_resume_behind_it(
    weights: EngineWeights, updater: Updater
) -> None:
    updater.scheduler.idle = False
    assert step(updater, RELEASE(tags=["weights"])) == [None]
    assert step(updater) == [None]
    assert step(updater, RESUME(tags=["weights"])) == [None, None]
    assert weights.state is State.SERVING
    updater.scheduler.idle = True
    assert step(updater) == ["released", "resumed"]
    assert weights.state is State.QUARANTINED
    assert not updater.offload_tags
    assert step(updater) == []


def test_what_fails_in_an_idle_engine_is_an_error(updater: Updater) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("something else")

    with pytest.raises(AssertionError, match="something else"):
        memory_release.release(fail, updater, RELEASE(tags=["weights"]))


@pytest.mark.parametrize(("tag", "state"), [("weights", "quarantined"), ("kv_cache", "serving")])
@pytest.mark.guarantee("released", fault="a resume that raises, as without memory")
def test_a_resume_that_fails_serves_nothing(
    weights: EngineWeights, updater: Updater, tag: str, state: str
) -> None:
    """It is passed on to SGLang, which ends the engine: it does not know what came back."""

    def fail(updater: Updater, request: Any) -> None:
        updater.offload_tags -= set(request.tags)  # as SGLang does, before it resumes any
        raise RuntimeError("out of memory")

    release(updater, tag)
    with pytest.raises(RuntimeError, match="out of memory"):
        memory_release.resume(fail, updater, RESUME(tags=[tag]))
    assert weights.state.value == state
    assert weights.released_tags == {tag}
    assert not weights.may_generate


@pytest.mark.parametrize(
    ("state", "away", "why"),
    [
        (State.SERVING, [], None),
        (State.QUARANTINED, [], "quarantined"),
        (State.SERVING, ["kv_cache"], "the memory of kv_cache is released"),
        (State.SERVING, ["cuda_graph"], "the memory of cuda_graph is released"),
    ],
)
@pytest.mark.guarantee("released", fault="requests that a pause kept over a release and a resume")
def test_what_a_pause_kept_does_not_go_on_in_quarantine(
    weights: EngineWeights, updater: Updater, state: State, away: list[str], why: str | None
) -> None:
    scheduler = updater.scheduler
    scheduler.waiting_queue = [SimpleNamespace(rid="a")]
    weights.state, weights.reason = state, "the weights' memory was released"
    weights.released_tags = frozenset(away)
    done = memory_release.continue_served(lambda _, asked: asked, scheduler, "continue")
    assert done == "continue"
    assert len(scheduler.waiting_queue) == (why is None)
    told = [(refusal.rid, refusal.finished_reason) for refusal in scheduler.sent]
    assert len(told) == (why is not None)
    assert all(rid == "a" and no["status_code"] == 503 for rid, no in told)
    assert all(why in no["message"] for _, no in told)
