"""Changes of what a rank stores: written, undone, and refused where it stores something else."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch

from sgl_fp8rl.ops import delta
from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from sgl_fp8rl.receiver.session import Session, SessionError
from sgl_fp8rl.receiver.writers.weight_writer import WeightWriter
from tests.sgl_fp8rl.kv import test_updates as with_kv
from tests.sgl_fp8rl.receiver import fake_gpu, toy
from tests.sgl_fp8rl.receiver.fake_gpu import Interpreter, span_of

gpu = fake_gpu.gpu
SMALL = 1 << 17
"""Bytes of a chunk, of which an update has many."""
BASE = "the update before"
KINDS = ("torch", "kernels")
ROUTER = "mlp.router.weight"
"""Sent in BF16, stored in FP32."""


class Rank:
    """One rank, whose writer is a CPU's, or a GPU's with an interpreter of its kernel."""

    def __init__(self, kind: str, rank: int, tp: int, request: pytest.FixtureRequest) -> None:
        model = toy.toy(rank, tp)
        self.rank, self.tp, self.gpu = rank, tp, None
        if kind == "kernels":
            interpreter: Interpreter = request.getfixturevalue("gpu")
            spans = [span_of(parameter) for parameter in model.parameters()]
            interpreter.writable += spans
            self.gpu = interpreter
        self.weights = toy.engine(model, toy.SHAPES)

    def holds(self, tensors: toy.Tensors) -> bool:
        expected = toy.expected(tensors, self.rank, self.tp)
        return toy.same(toy.contents(self.weights.model), expected)


@pytest.fixture(params=[(kind, rank, tp) for kind in KINDS for rank, tp in ((0, 1), (1, 2))])
def rank(request: pytest.FixtureRequest) -> Rank:
    """It holds the first version."""
    made = Rank(*request.param, request)
    commit(made.weights, codes(0))
    return made


def commit(weights: EngineWeights, sent: toy.Tensors) -> None:
    session = toy.begin(weights, sent, 0, SMALL)
    toy.write(session, sent)
    session.snapshot = BASE
    session.finish()
    weights.commit()


def stepped(seed: int) -> toy.Tensors:
    """The first version after a step that moves a thousandth of it."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(t.shape, generator=generator) < 0.001, t * 1.1, t)
        for name, t in toy.checkpoint(0).items()
    }


@cache
def codes(version: int) -> toy.Tensors:
    """What is sent of a version: the first one, or a step from it."""
    return toy.quantized(stepped(version) if version else toy.checkpoint(0))


def nan_by_the_high_byte(tensor: torch.Tensor) -> torch.Tensor:
    """BF16 values whose low byte is that of a NaN have become NaN, and no other byte changed."""
    bits = tensor.view(torch.int16)
    fits = (bits & 0x80 != 0) & (bits & 0x7F != 0)
    return torch.where(fits, bits & 0xFF | 0x7F00, bits).view(torch.bfloat16)


def chunk_of(session: Session, tensors: toy.Tensors, index: int) -> torch.Tensor:
    """The bytes of a chunk; those between its slices do not change."""
    manifest, bucket = session.writer.manifest, session.weights.memory.bucket
    assert bucket is not None
    content = bucket.slot(index, manifest).content
    content.zero_()
    toy.fill(session, tensors, index)
    return content.clone()


def change(
    session: Session, before: toy.Tensors, after: toy.Tensors, count: int = 1000, first: int = 0
) -> None:
    """Send what changes in the chunks from the first to the ``count``th."""
    assert session.weights.memory.bucket is not None
    for index in range(len(session.writer.chunks))[first:count]:
        payload = delta.difference(
            chunk_of(session, before, index), chunk_of(session, after, index)
        )
        assert payload is not None
        slot = session.weights.memory.bucket.slot(index, session.writer.manifest)
        slot.content.fill_(0xA5)
        slot.content[: payload.numel()].copy_(payload)
        session.change(index, payload.numel())
        assert torch.equal(slot.content[: payload.numel()], payload), "it is the trainer's"


def test_changes_leave_the_bytes_of_a_full_update(rank: Rank) -> None:
    for version in range(1, 4):
        session = toy.begin(rank.weights, codes(version), version, SMALL)
        assert session.base == BASE
        change(session, codes(version - 1), codes(version))
        session.snapshot = BASE
        session.finish()
        rank.weights.commit()
        assert rank.holds(stepped(version))
    assert rank.gpu is None or all(stage.closed for stage in rank.gpu.stages)


@pytest.mark.guarantee("one-version", fault="an update of changes fails before, between and after")
@pytest.mark.parametrize("count", [1, 3, 1000])
def test_what_was_changed_is_undone(rank: Rank, count: int) -> None:
    session = toy.begin(rank.weights, codes(1), 1, SMALL)
    change(session, codes(0), codes(1), count)
    assert session.can_undo and not rank.holds(toy.checkpoint(0))
    session.undo()
    rank.weights.resume()
    assert rank.holds(toy.checkpoint(0)) and rank.weights.state is State.SERVING
    session = toy.begin(rank.weights, codes(1), 2, SMALL)
    change(session, codes(0), codes(1))
    session.finish()
    rank.weights.commit()
    assert rank.holds(stepped(1))


@pytest.mark.parametrize("name", ["norm.weight", ROUTER])
def test_a_chunk_that_is_written_in_part_is_undone(rank: Rank, name: str) -> None:
    """NaN in a chunk's last tensor, which torch finds when it has written the others; or stored in
    a wider dtype, where it is another NaN than as BF16, if it is converted and not copied."""
    bad = {**codes(1), name: codes(1)[name].clone()}
    if name == ROUTER:
        bad[name] = nan_by_the_high_byte(bad[name])
    else:
        bad[name][3] = torch.nan
    session = toy.begin(rank.weights, bad, 1, SMALL)
    with pytest.raises(ValueError, match=f"{re.escape(name)} holds NaN"):
        change(session, codes(0), bad)
        session.finish()
    assert session.can_undo
    session.undo()
    assert rank.holds(toy.checkpoint(0))


def test_a_change_that_was_not_written_is_not_undone(request: pytest.FixtureRequest) -> None:
    """Its records were not exchanged for what was there."""
    rank = Rank("kernels", 0, 1, request)
    assert rank.gpu is not None
    commit(rank.weights, codes(0))
    session = toy.begin(rank.weights, codes(1), 1, SMALL)
    for first, last, lost in ((0, 1, 0), (1, 2, 1), (2, 1000, 0)):
        rank.gpu.lost_tiles = lost
        change(session, codes(0), codes(1), last, first)
    for action in (session.finish, session.undo):
        with pytest.raises(RuntimeError, match="were written"):
            action()


@pytest.mark.guarantee("in-place", fault="a parameter that moves during an update")
def test_what_moved_is_neither_finished_nor_undone(rank: Rank) -> None:
    """CUDA graphs read the memory where it was: only a complete start helps."""
    session = toy.begin(rank.weights, codes(1), 1, SMALL)
    change(session, codes(0), codes(1))
    parameter = rank.weights.model.get_parameter("norm.weight")
    parameter.data = parameter.data.clone()
    if rank.gpu is not None:
        rank.gpu.writable.append(span_of(parameter))
    for action in (session.finish, session.undo):
        with pytest.raises(SessionError, match=r"norm\.weight moved in memory"):
            action()
    assert not session.finished


def test_changes_behind_a_whole_chunk_are_not_kept(rank: Rank) -> None:
    """They are of no use: the chunk cannot be undone."""
    session = toy.begin(rank.weights, codes(1), 1, SMALL)
    change(session, codes(0), codes(1), 2)
    for index in range(2, len(session.writer.chunks)):
        toy.fill(session, codes(1), index)
        session.write(index)
        assert not session.can_undo and not session._undo_log
    session.finish()
    rank.weights.commit()
    assert rank.holds(stepped(1))


def test_control_changes_of_other_weights_are_seen(rank: Rank) -> None:
    other = {**codes(1), "norm.weight": codes(0)["norm.weight"]}
    session = toy.begin(rank.weights, codes(1), 1, SMALL)
    change(session, other, codes(1))
    session.finish()
    assert not rank.holds(stepped(1))


@contextmanager
def refused(session: Session, why: str) -> Iterator[None]:
    with pytest.raises(SessionError, match=why):
        yield
    assert not session.dirty


def test_only_what_is_stored_can_change(rank: Rank) -> None:
    """Not what another update stored, what is quantized here, or a version that failed."""
    sent = codes(1)
    for kind in (sent, stepped(1)):
        session = toy.begin(rank.weights, kind, 1, 2 * SMALL)
        with refused(session, "send it whole"):
            session.change(0, 3)
        rank.weights.resume()
    session = toy.begin(rank.weights, sent, 1, SMALL)
    for size in (-1, SMALL + 1, True, None):
        with refused(session, "more than its chunk"):
            session.change(0, size)
    rank.weights.quarantine("a failure")
    session = toy.begin(rank.weights, sent, 2, SMALL)
    with refused(session, "send it whole"):
        session.change(0, 3)
    toy.write(session, sent)
    assert not session.can_undo
    session.finish()
    rank.weights.commit()
    session = toy.begin(rank.weights, sent, 3, SMALL)
    with refused(session, "send it whole"):  # that trainer gave it no name
        session.change(0, 3)


@pytest.fixture(params=KINDS)
def has_kv(request: pytest.FixtureRequest) -> Callable[[toy.Tensors], EngineWeights]:
    """Makes an engine with an FP8 KV cache, which committed some tensors."""

    def make(sent: toy.Tensors) -> EngineWeights:
        kernels: Interpreter | None = None
        if request.param == "kernels":
            kernels = request.getfixturevalue("gpu")
        weights = with_kv.engine("trainer")
        if kernels is not None:
            kernels.writable += [span_of(parameter) for parameter in weights.model.parameters()]
        commit(weights, sent)
        if kernels is not None:
            (writer,) = weights._writers.values()
            kernels.writable += [span_of(scales) for scales in writer.deferred.values()]
        return weights

    return make


def scales_of(version: int) -> torch.Tensor:
    scales = with_kv.SCALES.clone()
    if version:
        scales[1, 1, version] *= 3
    return scales


@pytest.mark.parametrize("single", [False, True])
def test_scales_of_a_kv_cache_change_too(
    has_kv: Callable[[toy.Tensors], EngineWeights], single: bool
) -> None:
    """They are not stored as they come, so they are kept; single ones have no rows."""

    def sent(version: int) -> toy.Tensors:
        if not single:
            return codes(version) | {KV_SCALES: scales_of(version)}
        names = (f"model.layers.{n}.self_attn.attn.{x}_scale" for n in (0, 1) for x in "kv")
        return codes(version) | {n: torch.tensor(2.0 + version) for n in names}

    weights = has_kv(sent(0))
    for version in (1, 2):
        session = toy.begin(weights, sent(version), version, SMALL)
        change(session, sent(version - 1), sent(version))
        session.snapshot = BASE
        session.finish()
        weights.commit()
        kv = with_kv.kv_of(weights)
        if single:
            assert kv.store.unique().tolist() == [2.0 + version]
        else:
            assert torch.equal(kv.scales.amax(-1), scales_of(version).amax(-1))
        assert toy.same(toy.contents(weights.model), toy.expected(stepped(version)))


def test_scales_of_a_kv_cache_are_kept_on_the_gpu() -> None:
    """The kernel changes them there, though they come through the host's memory."""
    weights = with_kv.engine("trainer")
    sent = codes(0) | {KV_SCALES: with_kv.SCALES}
    session = toy.begin(weights, sent, 0, SMALL)
    writer, on_gpu = session.writer, torch.device("meta")
    session.writer = WeightWriter(
        writer.table, writer.manifest, writer.dtype, on_gpu, writer.kv_scales
    )
    toy.write(session, sent)
    assert session.writer.deferred[KV_SCALES].is_meta
