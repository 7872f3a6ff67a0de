"""``update`` end to end without SGLang: real transport, sockets and sessions, a fake scheduler."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.states import State
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge.fake_rank import DONE, TOKEN, Rank, hang_up, refuse
from tests.trainer_bridge.test_http_requests import started
from tests.trainer_bridge.test_sender import layout
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.ranks.collective import Leader
from trainer_bridge.session.transaction import BeginResult
from trainer_bridge.sources.parameters import Source
from trainer_bridge.updates import weights as weights_module
from trainer_bridge.updates.update import RUN, update
from trainer_bridge.updates.weights import Clock, WholeModel
from trainer_bridge.ways import carriers
from trainer_bridge.ways.carriers import Bucket

pytestmark = pytest.mark.timeout(120)

SMALL = 2 * 128 * 256 * 2
"""Bytes: a half holds 128 rows of the widest BF16 matrix, so tensors are split and halves turn."""


def engine_of(tp: int, bucket_bytes: int = 1 << 20) -> FakeEngine:
    ranks = [toy.engine(toy.toy(rank, tp), toy.SHAPES) for rank in range(tp)]
    return FakeEngine(ranks, bucket_bytes)


def holds(engine: FakeEngine, tensors: toy.Tensors) -> bool:
    return all(
        toy.same(toy.contents(w.model), toy.expected(tensors, rank, len(engine.ranks)))
        for rank, w in enumerate(engine.ranks)
    )


def test_what_an_update_tells_and_asks() -> None:
    engine = engine_of(2)
    for version in (0, 1, 5):
        result = update(toy.checkpoint(version), engine, version=version)
        assert set(result.seconds) == {"begin", "read", "write", "commit", "total"}
        stages = sum(s for name, s in result.seconds.items() if name != "total")
        assert stages <= result.seconds["total"]
    assert engine.ops == ["layout", "begin", "begin", "end", *["begin", "end"] * 2]


@pytest.mark.parametrize("bucket_bytes", [SMALL, 1 << 20])
def test_a_new_engine_at_the_same_address(bucket_bytes: int) -> None:
    """It knows neither the manifest nor the bucket that the trainer has shared."""
    engine = engine_of(2, SMALL)
    update(toy.checkpoint(), engine, version=3)
    engine.ranks, engine.bucket_bytes = engine_of(2).ranks, bucket_bytes
    engine.ops.clear()
    tensors = toy.checkpoint(1)
    update(tensors, engine, version=0)
    assert holds(engine, tensors)
    assert engine.ops == ["begin", "begin", "end"]
    assert len({tuple(weights.memory.known()) for weights in engine.ranks}) == 1


def test_a_refused_update_asks_for_the_layout_again() -> None:
    """A new engine at the address refuses the first time perhaps, and has a bucket of its own."""
    engine = engine_of(1)
    update(toy.checkpoint(), engine, version=3)
    engine.ranks, engine.bucket_bytes = engine_of(1).ranks, SMALL
    engine.ranks[0].policy = Policy(RUN, 7)
    engine.ops.clear()
    with pytest.raises(EngineError, match=r"version 4 .*version 7"):
        update(toy.checkpoint(), engine, version=4)
    tensors = toy.checkpoint(1)
    update(tensors, engine, version=8)
    assert holds(engine, tensors)
    assert engine.ops == ["begin", "layout", "begin", "begin", "end"]
    bucket = engine.ranks[0].memory.bucket
    assert bucket is not None and bucket.content.numel() == SMALL


def test_an_engine_with_dummy_weights_learns_what_it_keeps_in_fp32() -> None:
    """Until then nothing is rounded on the way: an FP32 router is exact from the first update."""
    engine = engine_of(1)
    engine.ranks[0].table = None
    engine.ranks[0].quarantine("started with dummy weights")
    for version in range(3):
        tensors = toy.checkpoint(version, torch.float32)
        kept = "mlp.router.weight"
        result = update(tensors, engine, version=version)
        sent = {n: t if n == kept else t.to(toy.BF16) for n, t in tensors.items()}
        assert holds(engine, sent)
        whole = tensors if version == 0 else sent
        assert result.bytes == sum(t.numel() * t.itemsize for t in whole.values())
    assert engine.ops == ["layout", "begin", "begin", "end"] * 2 + ["begin", "end"]


# -- one half of the bucket is filled while the ranks read the other


class Sockets:
    """An engine of fake ranks; a half of its bucket holds one vector of 64 floats."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks
        self.ops: list[str] = []

    def control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
        self.ops.append(message["op"])
        if message["op"] == "layout":
            return layout(state="serving", bucket_bytes=512, dtype="float32")
        if message["op"] == "begin":
            return {"sockets": [rank.path for rank in self.ranks], "token": TOKEN}
        assert message["op"] == "end"
        return {}


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[Sockets]:
    """At the end no trainer may be left on their sockets."""
    engine = Sockets([Rank(tmp_path), Rank(tmp_path)])
    yield engine
    for rank in engine.ranks:
        rank.join()


def vectors(count: int) -> dict[str, torch.Tensor]:
    return {f"v{i}": torch.full((64,), float(i)) for i in range(count)}


def first_of_each_part(rank: Rank) -> list[float]:
    """From the slot that the chunk lies in."""
    buckets = [torch.frombuffer(bytearray(b), dtype=torch.float32) for b in rank.chunks]
    return [float(bucket.view(2, 64)[i % 2, 0]) for i, bucket in enumerate(buckets)]


def test_parts_come_in_order_from_halves_that_take_turns(sockets: Sockets) -> None:
    result = update(vectors(5), sockets, version=0)
    assert (result.gpu_seconds, result.mapped_bytes, result.bytes) == (None, 0, 5 * 256)
    for rank in sockets.ranks:
        rank.join()
        assert first_of_each_part(rank) == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert rank.ops() == ["hello", "bucket", *["chunk"] * 5, "finish", "commit"]
        assert [m["index"] for m in rank.messages if m.get("op") == "chunk"] == [0, 1, 2, 3, 4]
    assert sockets.ops == ["layout", "begin", "end"]


def failing(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same, but for the sixth time."""
    left = iter(range(5))

    def failing_late(*args: Any) -> Any:
        if next(left, None) is None:
            raise MemoryError("no room")
        return call(*args)

    return failing_late


@contextmanager
def update_while_a_rank_reads(sockets: Sockets, count: int) -> Iterator[threading.Thread]:
    """An update of ``count`` vectors, whose second rank reads its first chunk until the end."""
    slow = threading.Event()
    sockets.ranks[1].answer = lambda message: (
        DONE if message.get("op") != "chunk" or slow.wait(20) else None
    )
    trainer = started(partial(update, vectors(count), sockets, version=0))
    deadline = time.monotonic() + 20
    while not sockets.ranks[0].chunks and time.monotonic() < deadline:
        time.sleep(0.01)
    trainer.join(0.5)
    yield trainer
    slow.set()
    trainer.join(20)
    assert not trainer.is_alive()
    for rank in sockets.ranks:
        rank.join()


def test_a_half_is_not_filled_before_all_ranks_have_read_it(sockets: Sockets) -> None:
    """A rank that is slow with the first chunk still finds its values there."""
    with update_while_a_rank_reads(sockets, 3) as trainer:
        assert trainer.is_alive()  # v0's half is still being read, so v2 must wait
    for rank in sockets.ranks:
        assert first_of_each_part(rank) == [0.0, 1.0, 2.0]


def test_the_next_chunk_waits_for_the_only_slot(
    sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds two of the vectors."""
    monkeypatch.setattr(carriers.Carrier, "slots", 1)
    with update_while_a_rank_reads(sockets, 6):
        assert len(sockets.ranks[0].chunks) == 1  # the other rank still reads it
    for rank in sockets.ranks:
        found = [torch.frombuffer(bytearray(b), dtype=torch.float32)[::64] for b in rank.chunks]
        assert [pair.tolist() for pair in found] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


def test_the_slowest_gpu_is_told(sockets: Sockets) -> None:
    for rank, seconds in zip(sockets.ranks, (0.25, 0.5), strict=True):
        rank.answer = lambda message, seconds=seconds: {"gpu_seconds": seconds}  # type: ignore[misc]
    assert update(vectors(1), sockets, version=0).gpu_seconds == 0.5


@pytest.mark.parametrize("op", ["bucket", "chunk", "finish", "commit"])
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [(partial(refuse, sentence="out of luck"), "^out of luck$"), (hang_up, "ended")],
)
def test_a_rank_that_fails_ends_the_session_of_all(
    sockets: Sockets, op: str, fault: Any, sentence: str, buckets: list[Bucket]
) -> None:
    sockets.ranks[1].answer = fault(op)
    with pytest.raises(EngineError, match=sentence) as held:
        update(vectors(5), sockets, version=0)
    assert sockets.ops == ["layout", "begin", "end"]
    for rank in sockets.ranks:
        rank.join()  # let go, also while the error is still held
    # "abort" is passed over by a rank whose reply finds the trainer gone
    assert sockets.ranks[0].ops()[-1] in ("abort", op)
    assert [bucket.close.alive for bucket in buckets] == [False]
    assert held.value is not None


# -- refused: nothing is written


def refused(engine: FakeEngine, tensors: toy.Tensors, fault: str, **options: Any) -> None:
    before = [toy.contents(w.model) for w in engine.ranks]
    states = [(w.state, w.policy.version) for w in engine.ranks]
    with pytest.raises((EngineError, ManifestError), match=fault):
        update(tensors, engine, **options)
    assert all(
        toy.same(a, toy.contents(w.model)) for a, w in zip(before, engine.ranks, strict=True)
    )
    assert [(w.state, w.policy.version) for w in engine.ranks] == states
    assert "end" not in engine.ops


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        *(({"version": x}, "whole number") for x in (-1, True, 1.5, "1", None, torch.tensor([3]))),
        *(({"run": run}, r"run is .*name") for run in ("", "a" * 65, "two\nlines", 7)),
        ({"version": 4}, "version 4 .*version 4"),
    ],
)
def test_a_policy_that_is_none_or_not_newer(options: Any, fault: str) -> None:
    engine = engine_of(2)
    update(toy.checkpoint(), engine, version=4)
    engine.ops.clear()
    refused(engine, toy.checkpoint(1), fault, **{"version": 5, **options})
    assert engine.ops == (["begin"] if options == {"version": 4} else [])


def test_a_bucket_that_is_too_small_for_128_rows() -> None:
    """It is known from the manifest, so no session begins."""
    engine = engine_of(2, 4096)
    refused(engine, toy.checkpoint(), "--fp8rl-bucket-bytes", version=0)
    engine.bucket_bytes = SMALL
    heals(engine)


# -- failed: no rank serves what was half written, and the next update heals


def heals(engine: FakeEngine) -> None:
    tensors = toy.checkpoint(1)
    update(tensors, engine, version=0)
    assert holds(engine, tensors)
    assert {w.state for w in engine.ranks} == {State.SERVING}


@pytest.mark.guarantee("all-or-none", fault="NaN or Inf in the slice of one rank of two")
@pytest.mark.parametrize("bucket_bytes", [1 << 20, SMALL])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["embed.weight", "attn.v.weight", "norm.weight"])
def test_nan_quarantines_every_rank(name: str, bad: float, bucket_bytes: int) -> None:
    engine, tensors = engine_of(2, bucket_bytes), toy.checkpoint()
    tensors[name].view(-1)[-1] = bad  # in the slice of rank 1
    with pytest.raises(EngineError, match=f"{name}.*NaN or Inf"):
        update(tensors, engine, version=0)
    assert engine.ops[-1] == "end"
    assert [reply["ended"] for reply in engine.ended] == [False] * len(engine.ranks)
    assert {w.state for w in engine.ranks} == {State.QUARANTINED}
    assert {w.policy.version for w in engine.ranks} == {-1}
    heals(engine)


@pytest.mark.guarantee("quarantine", fault="an exception in the trainer during an update")
def test_a_trainer_that_breaks_off_quarantines_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(2, SMALL)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(Source, "read", failing(Source.read))
        update(toy.checkpoint(), engine, version=0)
    assert engine.ops[-1] == "end"
    assert {w.state for w in engine.ranks} == {State.QUARANTINED}
    assert "trainer" in engine.ranks[0].reason
    heals(engine)


def test_an_engine_that_dies_is_the_error_that_is_raised() -> None:
    """Not the failure to end a session of an engine that is gone."""
    engine, tensors = engine_of(1), toy.checkpoint()
    tensors["norm.weight"][0] = float("nan")
    engine.lost = ["end"]
    with pytest.raises(EngineError, match=r"norm\.weight.*NaN"):
        update(tensors, engine, version=0)


def test_nothing_is_planned_where_engines_read_everything_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a rank that does not lead, which has no plan: to make one takes longer than all else."""
    planned: list[object] = []
    monkeypatch.setattr(
        weights_module, "sources_for", lambda named, *_: planned.append(named) or []
    )
    model = WholeModel({"w": torch.ones(2), "v": torch.ones(2)})
    begun = BeginResult(Policy("run", 0), False, [{}], {}, [[True, True]], False, False, False)
    model.send(Leader(()), None, begun, Clock())
    assert not planned
    with pytest.raises(IndexError):  # the control: it needs the plan that is not there
        model.send(Leader(()), None, begun._replace(mapped=[[True, False]]), Clock())
    assert planned
