"""Updates from an iterator that can be walked once, in an order that nobody knows before."""

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.snapshot import Steps
from sgl_fp8rl.protocol.states import State
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge.calls import before
from tests.trainer_bridge.test_matrix import Pairs, shuffled
from tests.trainer_bridge.test_update import SMALL, engine_of, holds
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.session.kept import KEPT
from trainer_bridge.transfer.packer import HostPacker
from trainer_bridge.transfer.transfer_plan import TransferPlan
from trainer_bridge.updates.update import update
from trainer_bridge.ways.carriers import Chunks, Lookahead

pytestmark = pytest.mark.timeout(120)


def state_of(engine: FakeEngine) -> State:
    (state,) = {weights.state for weights in engine.ranks}
    return state


def dummy_engine(tp: int = 1) -> FakeEngine:
    engine = engine_of(tp, SMALL)
    for weights in engine.ranks:
        weights.table = None
        weights.quarantine("started with dummy weights")
    return engine


class Walked:
    """An iterator that tells how far it was walked, and how many of its tensors are still held."""

    def __init__(self, pairs: Pairs) -> None:
        self.left, self.most_held = len(pairs), 0
        self._names = [name for name, _ in pairs]
        self._pairs = pairs
        self._held: list[weakref.ref[torch.Tensor]] = []

    def __iter__(self) -> "Walked":
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        self.most_held = max(self.most_held, sum(ref() is not None for ref in self._held))
        if not self.left:
            raise StopIteration
        name, tensor = self._pairs[len(self._pairs) - self.left]
        tensor = tensor.clone()
        self._held.append(weakref.ref(tensor))
        self.left -= 1
        return name, tensor


def test_a_tensor_is_let_go_before_the_next_one() -> None:
    engine = engine_of(2, SMALL)
    for version in range(3):
        stream = Walked(shuffled(toy.checkpoint(version), 0))
        update(stream, engine, version=version)
        assert stream.left == 0
        assert stream.most_held <= 1
    # the manifest goes out for the first stream, and for the first in the order that it had
    assert engine.ops == ["layout", "tensors", *["begin", "begin", "end"] * 2, "begin", "end"]


def test_the_plan_of_a_stream_is_kept_until_a_stream_comes_differently() -> None:
    """Also while whole models are sent between streams."""
    engine, tensors = engine_of(1, SMALL), toy.checkpoint()
    connection = KEPT.connection_to(engine)

    def planned() -> TransferPlan:
        sender = connection.sender
        assert sender is not None
        return sender.stream_plan(connection.client, None, [], None)

    update(iter(tensors.items()), engine, version=0)
    first = planned()
    assert not first.streamed
    for version in (1, 2):
        update(iter(tensors.items()), engine, version=version)
        assert planned() is first
    update(shuffled(tensors, 2), engine, version=3)
    assert planned() is first
    connection.forget()  # as after a failure
    assert connection.sender is None
    update(iter(shuffled(tensors, 1)), engine, version=4)
    assert planned() is not first
    assert list(planned().views) == [name for name, _ in shuffled(tensors, 1)]
    assert holds(engine, tensors)


class Held:
    """Counts the bytes of a stream that wait for their turn, and runs out of memory at a limit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most, self.limit = 0, 1 << 30
        own = Chunks.own

        def counted(chunks: Chunks, index: int) -> None:
            own(chunks, index)
            held = sum(whole.nbytes for whole in chunks._held.values())
            self.most = max(self.most, held)
            if held > self.limit:
                raise MemoryError("no memory")

        monkeypatch.setattr(Chunks, "own", counted)


def test_what_is_held_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the first one, nor of one that comes as the last one came."""
    held, engine, bytes_held = Held(monkeypatch), engine_of(1, SMALL), []
    for version, seed in enumerate((1, 1, 2, 2)):
        held.most = 0
        update(iter(shuffled(toy.checkpoint(version), seed)), engine, version=version)
        bytes_held.append(held.most)
    assert bytes_held[2] > SMALL
    assert bytes_held == [0, 0, bytes_held[2], 0]


@pytest.mark.parametrize("engines", [1, 2])
def test_a_stream_that_failed_for_its_order_is_planned_as_it_comes(
    engines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as the last one came: what is held for that made it fail, and would again. The second
    engine does not begin, so it keeps what the trainer knows of streams."""
    held, alive = Held(monkeypatch), engine_of(1, SMALL)
    targets = [alive, engine_of(1, SMALL)][:engines]
    for version in range(2):
        update(iter(shuffled(toy.checkpoint(version), 1)), targets, version=version)
    for each in targets[1:]:
        each.dead = ("begin",)
    tensors, held.limit = toy.checkpoint(2), SMALL
    with pytest.raises(MemoryError):
        update(iter(shuffled(tensors, 2)), targets, version=2, require=1)
    held.most = 0
    update(iter(shuffled(tensors, 2)), targets, version=2, require=1)
    assert held.most == 0
    assert holds(alive, tensors)


def test_a_packer_gets_the_dtype_that_was_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's kernel reads the bytes of that dtype, whatever the stream brings."""
    engine, seen = engine_of(1), {}

    def note(self: HostPacker, index: int, whole: torch.Tensor, chunk: int) -> None:
        seen[index] = whole.dtype, self._plan.sources[index].held_as

    before(monkeypatch, HostPacker, "put", note)
    tensors = toy.checkpoint()
    announce = [(name, torch.float32, t.shape) for name, t in tensors.items()]
    update(iter(tensors.items()), engine, version=0, announce=announce)
    assert set(seen.values()) == {(torch.float32, torch.float32)}
    assert len(seen) == len(tensors)
    assert holds(engine, tensors)


# -- failures: the iterator is walked to its end, and then the error is raised


@pytest.mark.guarantee("all-or-none", fault="a stream that fails, before or after it began")
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("unknown", "unknown: lm_head.weight"),
        ("twice", "comes twice"),
        ("shape", "has shape"),
        ("codes", "was announced; announce the dtypes"),
        ("missing", "missing: "),
        ("NaN", "NaN"),
    ],
)
def test_a_failure_exhausts_the_iterator_and_a_complete_stream_heals(
    fault: str, error: str, later: bool
) -> None:
    """In the first stream, whose order is not known, and in a later one."""
    engine, version = engine_of(2, SMALL), 0
    if later:
        update(iter(shuffled(toy.checkpoint(), 3)), engine, version=0)
        version = 1
    pairs = shuffled(toy.checkpoint(version), 3)
    name, tensor = pairs[5]
    at_fault = {
        "unknown": ("lm_head.weight", tensor),
        "twice": pairs[2],
        "shape": (name, tensor.new_zeros(1, *tensor.shape)),
        "codes": (name, tensor.to(torch.float8_e4m3fn)),
        "NaN": (name, torch.full_like(tensor, float("nan"))),
    }
    broken = [*pairs[:5], *([at_fault[fault]] if fault in at_fault else []), *pairs[6:]]
    stream = Walked(broken)
    with pytest.raises((ManifestError, EngineError), match=error):
        update(stream, engine, version=version)
    assert stream.left == 0
    assert state_of(engine) is State.QUARANTINED
    healed = toy.checkpoint(9)
    update(iter(shuffled(healed, 3)), engine, version=version + 1)
    assert holds(engine, healed)


def test_an_update_that_is_refused_exhausts_the_iterator() -> None:
    engine = engine_of(1)
    update(toy.checkpoint(), engine, version=4)
    for version in (4, -1):
        stream = Walked(shuffled(toy.checkpoint(1), 0))
        with pytest.raises((ManifestError, EngineError), match="version"):
            update(stream, engine, version=version)
        assert stream.left == 0
    assert holds(engine, toy.checkpoint())


def test_an_error_of_the_iterator_itself_reaches_the_caller() -> None:
    engine = engine_of(1, SMALL)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield from shuffled(toy.checkpoint(), 0)[:6]
        raise RuntimeError("a rank of the trainer is gone")

    with pytest.raises(RuntimeError, match="a rank of the trainer is gone"):
        update(stream(), engine, version=0)
    assert state_of(engine) is State.QUARANTINED
    tensors = toy.checkpoint(1)
    update(iter(shuffled(tensors, 0)), engine, version=1)
    assert holds(engine, tensors)


# -- what is announced


@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_of_dummy_weights_needs_an_announcement(tp: int, tmp_path: Path) -> None:
    engine, tensors = dummy_engine(tp), toy.checkpoint()
    with pytest.raises(ManifestError, match="pass announce="):
        update(iter(tensors.items()), engine, version=0)
    with pytest.raises(ValueError, match="has no safetensors files"):
        update(iter(tensors.items()), engine, version=0, announce=tmp_path)
    names = sorted(tensors)
    for part, some in enumerate((names[:3], names[3:])):
        save_file({name: tensors[name] for name in some}, tmp_path / f"{part}.safetensors")
    listed = [(name, t.dtype, t.shape) for name, t in tensors.items()]
    for announce in (str(tmp_path), listed):
        engine = dummy_engine(tp)
        for version in range(3):
            tensors = toy.checkpoint(version)
            update(iter(shuffled(tensors, 2)), engine, version=version, announce=announce)
            assert holds(engine, tensors)


@pytest.mark.parametrize("reply", [{}, {"shapes": 3}, {"shapes": {"w": [0]}}])
def test_an_answer_that_names_no_shapes_is_refused(
    reply: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(1)
    real = engine.control
    monkeypatch.setattr(engine, "control", lambda m, *_: reply if m["op"] == "tensors" else real(m))
    with pytest.raises((EngineError, ManifestError)):
        update(iter(toy.checkpoint().items()), engine, version=0)
    assert state_of(engine) is State.SERVING


def test_results_come_in_order_and_as_soon_as_they_are_there() -> None:
    done: list[str] = []

    def work(name: str, waits: int) -> Steps[str]:
        for step in range(waits):
            done.append(f"{name}{step}")
            yield
        return name

    ahead = Lookahead[str]()
    assert list(ahead.push(work("a", 2))) == []
    assert list(ahead.push(work("b", 0))) == [], "a comes first"
    assert list(ahead.push(work("c", 2))) == ["a", "b"]
    assert done == ["a0", "a1", "c0"]
    assert list(ahead.push(work("d", 1))) == []
    assert done[3:] == ["d0", "c1"], "what can be queued is, before anything is waited for"
    assert list(ahead.drain()) == ["c", "d"]
    assert list(ahead.drain()) == []
