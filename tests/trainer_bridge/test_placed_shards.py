"""Shards that engines read where they lie: what ranks tell each other, and updates by it."""

import logging
import time
from collections.abc import Callable, Collection
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from sgl_fp8rl.protocol.cuda_memory import Handle
from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.place import here
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from sgl_fp8rl.receiver.session import Session
from sgl_fp8rl.receiver.writers.shared_memory import SharedMemory
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.sgl_fp8rl.receiver.fake_gpu import span_of
from tests.trainer_bridge import fake_ipc, ranks
from trainer_bridge.ranks.collective import Leader
from trainer_bridge.session.kept import KEPT
from trainer_bridge.shards import placed_shards
from trainer_bridge.shards.placed_shards import PlacedShards, ShardRegistry, Shards
from trainer_bridge.sources.parameters import Named
from trainer_bridge.transport.cuda_ipc import Placement
from trainer_bridge.updates.update import UpdateResult, update

WORLD, TP = 2, 2
COLLECTIVE_TIMEOUT_S = 30
GPU = fake_ipc.GPU


# -- where the rows of a tensor lie


def placement(offsets: list[int], seed: str) -> Placement:
    """Each shard in an allocation of its own."""
    handles = tuple(Handle("ab" * 64, 1 << 20, GPU) for _ in offsets)
    return Placement((), (), handles, tuple(enumerate(offsets)), seed)


@st.composite
def shardings(draw: st.DrawFn) -> tuple[torch.Tensor, list[tuple[int, int]], int, int]:
    """A parameter, the rows of each rank, and an HF tensor in it: its first row, and its rows."""
    rows, cols = draw(st.integers(1, 24)), draw(st.integers(1, 3))
    cuts = sorted(draw(st.lists(st.integers(0, rows), max_size=3)))
    ends = [0, *cuts, rows]
    first = draw(st.integers(0, rows - 1))
    count = draw(st.integers(1, rows - first))
    held = list(pairwise(ends))
    parameter = torch.arange(rows * cols, dtype=torch.int16).view(rows, cols)
    return parameter, held, first, count


@given(shardings())
def test_pieces_are_the_rows_of_the_tensor(
    drawn: tuple[torch.Tensor, list[tuple[int, int]], int, int],
) -> None:
    parameter, held, first, count = drawn
    cols = parameter.shape[1]
    memory: list[torch.Tensor] = []
    placed = []
    for rank, (start, stop) in enumerate(held):
        offset = 16 * rank
        raw = parameter[start:stop].contiguous().view(torch.uint8).view(-1)
        memory.append(torch.cat([torch.full((offset,), 0xA5, dtype=torch.uint8), raw]))
        spots = {0: 0} if start < stop else {}
        placed.append(
            PlacedShards(
                here(), ((start * cols, stop * cols),), spots, placement([offset], str(rank))
            )
        )
    view = parameter.to("meta")[first : first + count]
    pieces = Shards(placed, [parameter.numel()]).pieces(0, view)
    assert pieces is not None
    found = [
        memory[segment][offset : offset + 2 * cols * (b - a)] for segment, offset, (a, b) in pieces
    ]
    assert torch.equal(torch.cat(found).view(torch.int16).view(-1, cols), parameter[first:][:count])
    assert [piece.rows[0] for piece in pieces] == [0, *(piece.rows[1] for piece in pieces[:-1])]


# -- what ranks tell the one that leads


def told(seed: str, host: dict[str, Any] | None = None) -> PlacedShards:
    return PlacedShards(host or here(), ((0, 4),), {0: 0}, placement([0], seed))


NAMED: Named = [("w", torch.ones(4))]


def test_what_all_have_told_before_is_read_in_place() -> None:
    registry = ShardRegistry()
    assert registry.assemble([told("a"), told("b")], NAMED) is None
    assert not registry._shards, "nothing is made of what may move at each update"
    shards = registry.assemble(["a", "b"], NAMED)
    assert shards is not None and shards.seeds == ("a", "b")
    assert registry.assemble(["a", "b"], NAMED) is shards
    assert registry.assemble(["a", told("c")], NAMED) is None, "it moved on one rank"
    assert registry.assemble(["a", None], NAMED) is None
    again = registry.assemble(["a", "c"], NAMED)
    assert again is not None and again.seeds == ("a", "c")


def test_a_rank_that_was_never_heard_is_not_read() -> None:
    assert ShardRegistry().assemble(["a"], NAMED) is None


def test_another_host_is_not_read() -> None:
    registry, elsewhere = ShardRegistry(), {**here(), "boot": "of another kernel"}
    registry.assemble([told("a"), told("b", elsewhere)], NAMED)
    assert registry.assemble(["a", "b"], NAMED) is None


def test_registries_do_not_grow() -> None:
    registry = ShardRegistry()
    for number in range(3 * placed_shards.KEPT):
        registry.assemble([told(f"{number}")], NAMED)
        registry.assemble([f"{number}"], NAMED)
    assert len(registry._of_ranks) == len(registry._shards) == placed_shards.KEPT


# -- updates of an engine on GPUs from several ranks


def test_memory_that_is_made_again_is_other_memory() -> None:
    """As of CUDA: or an engine of an earlier job would seem to have it open."""
    memories = fake_ipc.Memories()
    handles = set()
    for _ in range(3):
        base = memories.allocate(64).data_ptr()
        handles.add(memories.export(base))
        memories.free(base)
    assert len(handles) == 3 and not memories.torn


class GpuEngine(FakeEngine):
    """Of two ranks, which run the writer of a GPU."""

    def __init__(self, writable: list[tuple[int, int]]) -> None:
        super().__init__([toy.engine(toy.toy(rank, TP), toy.SHAPES) for rank in range(TP)])
        self.visible_gpus = [GPU]
        for weights in self.ranks:
            weights.memory = SharedMemory(torch.device("cuda", 0))
            writable += [span_of(parameter) for parameter in weights.model.parameters()]

    def control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
        reply = super().control(message)
        return {**reply, "gpus": [GPU] * TP} if message["op"] == "layout" else reply

    def holds(self, tensors: toy.Tensors) -> bool:
        return all(
            toy.same(toy.contents(w.model), toy.expected(tensors, rank, TP))
            for rank, w in enumerate(self.ranks)
        )


class Trainer:
    """The shards of this rank, as FSDP2 has them, in memory that can be shared."""

    def __init__(self, memories: fake_ipc.Memories, rank: int, dtype: torch.dtype) -> None:
        self._memories, self._rank, self._dtype = memories, rank, dtype
        self._mesh = init_device_mesh("cpu", (WORLD,))
        self.named: dict[str, torch.Tensor] = {}
        self.move()

    def move(self) -> None:
        """Let the shards lie elsewhere from now on."""
        for name, shape in toy.SHAPES.items():
            size = -(-shape[0] // WORLD)
            rows = max(min(size, shape[0] - self._rank * size), 0)
            local = torch.Size((rows, *shape[1:]))
            content = self._memories.allocate(max(local.numel(), 1) * self._dtype.itemsize)
            shard = content[: local.numel() * self._dtype.itemsize].view(self._dtype).view(local)
            strides = torch.empty(shape, device="meta").stride()
            self.named[name] = DTensor.from_local(
                shard, self._mesh, (Shard(0),), shape=torch.Size(shape), stride=strides
            )

    def become(self, tensors: toy.Tensors) -> dict[str, torch.Tensor]:
        """Write weights into the shards, where they lie."""
        for name, tensor in tensors.items():
            size = -(-tensor.shape[0] // WORLD)
            shard = cast(Any, self.named[name]).to_local()
            shard.copy_(tensor[self._rank * size :][: len(shard)].to(self._dtype))
        return self.named


CODED = {name for name in toy.FP8_NAMES if not name.endswith(("attn.o.weight", "down.weight"))}
"""What ranks quantize for several engines; of the others each of two ranks has half a block."""


def mapped_bytes(tensors: toy.Tensors, coded: Collection[str], itemsize: int = 2) -> int:
    """What engines read in place of such weights, where some are codes with their scales."""
    codes = sum(t.numel() + 4 * (t.numel() >> 14) for n, t in tensors.items() if n in coded)
    return codes + sum(t.numel() * itemsize for n, t in tensors.items() if n not in coded)


def read_in_place(rank: int, folder: Path, dtype: torch.dtype, count: int) -> None:
    logging.disable(logging.CRITICAL)
    with pytest.MonkeyPatch.context() as patch:
        memories, interpreter = fake_ipc.install(patch)
        trainer = Trainer(memories, rank, dtype)
        engines = [GpuEngine(interpreter.writable) for _ in range(count)] if rank == 0 else []
        gathered: list[torch.Size] = []
        full_tensor = DTensor.full_tensor
        patch.setattr(
            DTensor, "full_tensor", lambda t, **o: gathered.append(t.shape) or full_tensor(t, **o)
        )
        versions = iter(range(100))

        def step(in_place: bool, as_codes: bool = False) -> UpdateResult:
            version = next(versions)
            tensors = toy.checkpoint(version)
            gathered.clear()
            result = update(trainer.become(tensors), engines or None, version=version)
            assert all(engine.holds(tensors) for engine in engines), version
            assert len(gathered) == (0 if in_place else len(toy.SHAPES)), version
            read = mapped_bytes(tensors, CODED if as_codes else set(), dtype.itemsize)
            assert result.mapped_bytes == read * in_place, version
            return result

        step(in_place=False)
        step(in_place=True)
        step(in_place=True, as_codes=count > 1)
        if rank == 1:
            trainer.move()
        step(in_place=False)
        step(in_place=True)
        assert not fake_ipc.MappedFile.opened or rank == 0

        bad = toy.checkpoint(next(versions))
        bad["mlp.experts.1.up.weight"][-1, -1] = torch.nan  # rank 1 holds it
        with pytest.raises(Exception, match=r"experts\.1\.up\.weight holds NaN"):
            update(trainer.become(bad), engines or None, version=90)
        versions = iter(range(91, 100))
        step(in_place=False)
        step(in_place=True)

        for engine in engines[-1:]:
            engine.visible_gpus = ["GPU of another container"]
        everywhere: list[Any] = [None] * WORLD
        dist.all_gather_object(everywhere, None)
        with pytest.raises(Exception, match="NaN"):  # the layout is asked for again
            update(trainer.become(bad), engines or None, version=98)
        step(in_place=False)
        versions = iter(range(100, 110))
        step(in_place=False)


def under_other_names(rank: int, folder: Path) -> None:
    """The same memory in the same order: what is read is what the names say."""
    with pytest.MonkeyPatch.context() as patch:
        memories, interpreter = fake_ipc.install(patch)
        trainer = Trainer(memories, rank, torch.bfloat16)
        engine = GpuEngine(interpreter.writable) if rank == 0 else None
        tensors = toy.checkpoint(0)
        for version in range(2):
            update(trainer.become(tensors), engine, version=version)
        swap = {"attn.q.weight": "attn.k.weight", "attn.k.weight": "attn.q.weight"}
        for version in (2, 3):
            named = {swap.get(name, name): shard for name, shard in trainer.named.items()}
            update(named, engine, version=version)
            wanted = {swap.get(name, name): tensor for name, tensor in tensors.items()}
            assert engine is None or engine.holds(wanted)
        # shards that stay, at other places among the parameters
        sharded = [(name, shard) for name, shard in trainer.named.items() if name != "norm.weight"]
        for version in range(4, 10):
            norm = [("norm.weight", tensors["norm.weight"])]
            at = 3 * (version % 3)
            update([*sharded[:at], *norm, *sharded[at:]], engine, version=version)
            assert engine is None or engine.holds(tensors)


class KVEngine(GpuEngine):
    """With an FP8 KV cache, as far as a trainer sees."""

    def control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
        reply = super().control(message)
        cache = {"kv_cache": {"layers": 2, "kv_heads": 3}} if message["op"] == "layout" else {}
        return {**reply, **cache}


def with_kv_scales(rank: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        memories, interpreter = fake_ipc.install(patch)
        patch.setattr(
            EngineWeights, "kv_scales_in", lambda self, m: frozenset({KV_SCALES} & m.tensors.keys())
        )
        trainer = Trainer(memories, rank, torch.bfloat16)
        engine = KVEngine(interpreter.writable) if rank == 0 else None
        for version in range(4):
            tensors, scales = toy.checkpoint(version), torch.ones(2, 2, 3)
            result = update(trainer.become(tensors), engine, version=version, kv_scales=scales)
            assert engine is None or engine.holds(tensors)
            assert (result.mapped_bytes > 0) == (version > 0)


def of_a_gpu_that_cannot_be_opened(rank: int, folder: Path) -> None:
    """That of the second rank: weights are gathered on the first one's, which can."""
    logging.disable(logging.CRITICAL)
    with pytest.MonkeyPatch.context() as patch:
        memories, interpreter = fake_ipc.install(patch)
        fake_ipc.refuse_others(patch)
        trainer = Trainer(memories, rank, torch.bfloat16)
        engine = GpuEngine(interpreter.writable) if rank == 0 else None
        for version in range(3):
            tensors = toy.checkpoint(version)
            result = update(trainer.become(tensors), engine, version=version)
            assert engine is None or engine.holds(tensors)
            assert result.mapped_bytes == 0
        if engine is not None:
            assert not KEPT.connection_to(engine).through_host


def to_an_engine_that_was_restarted(rank: int, folder: Path) -> None:
    """With dummy weights: it does not know yet what it keeps in FP8."""
    with pytest.MonkeyPatch.context() as patch:
        memories, interpreter = fake_ipc.install(patch)
        trainer = Trainer(memories, rank, torch.bfloat16)
        engine = GpuEngine(interpreter.writable) if rank == 0 else None
        for version in range(5):
            if version == 2 and rank == 0:
                engine = GpuEngine(interpreter.writable)
                for weights in engine.ranks:
                    weights.table, weights.state = None, State.QUARANTINED
            tensors = toy.checkpoint(version)
            update(trainer.become(tensors), engine, version=version)
            assert engine is None or engine.holds(tensors)


def until_no_rank_reads_them(rank: int, folder: Path) -> None:
    """A rank of the engine fails; the trainer's ranks go on when the others have ended."""
    logging.disable(logging.CRITICAL)
    with pytest.MonkeyPatch.context() as patch:
        memories, interpreter = fake_ipc.install(patch)
        trainer = Trainer(memories, rank, torch.bfloat16)
        engine = GpuEngine(interpreter.writable) if rank == 0 else None
        for version in range(2):
            update(trainer.become(toy.checkpoint(version)), engine, version=version)
        write, reading = Session.write, folder / "reading"

        def failing(self: Session, index: int) -> None:
            if engine is not None and self.writer.is_mapped(index):
                if self.weights is engine.ranks[0]:
                    raise ValueError("a fault of one rank")
                reading.touch()
                time.sleep(1.0)
                reading.unlink()
            write(self, index)

        patch.setattr(Session, "write", failing)
        with pytest.raises(Exception, match="a fault of one rank"):
            update(trainer.become(toy.checkpoint(2)), engine, version=2)
        assert not reading.exists()


def while_a_rank_leaves(rank: int, folder: Path) -> None:
    """It hears an alarm of its own, and its optimizer goes on while the engine reads."""
    logging.disable(logging.CRITICAL)
    with pytest.MonkeyPatch.context() as patch:
        memories, interpreter = fake_ipc.install(patch)
        trainer = Trainer(memories, rank, torch.bfloat16)
        engine = GpuEngine(interpreter.writable) if rank == 0 else None
        for version in range(2):
            update(trainer.become(toy.checkpoint(version)), engine, version=version)
        share = Leader.share
        heard = iter(range(10))

        def alarmed(self: Leader, value: Any) -> Any:
            if next(heard) == 1:  # the first one began the update
                raise InterruptedError
            return share(self, value)

        with pytest.MonkeyPatch.context() as now:
            # the package's ``update`` is the function
            now.setattr(import_module("trainer_bridge.updates.update"), "PRESENCE_S", 3.0)
            if rank == 0:
                with pytest.raises(TimeoutError, match="another rank did not call it"):
                    update(trainer.become(toy.checkpoint(2)), engine, version=2)
                assert engine is not None
                assert [weights.state for weights in engine.ranks] == [State.QUARANTINED] * TP
            else:
                now.setattr(Leader, "share", alarmed)
                with pytest.raises(InterruptedError):
                    update(trainer.become(toy.checkpoint(2)), engine, version=2)
        for version in (3, 4):
            update(trainer.become(toy.checkpoint(version)), engine, version=version)
            assert engine is None or engine.holds(toy.checkpoint(version))


OTHERS = (
    under_other_names,
    with_kv_scales,
    of_a_gpu_that_cannot_be_opened,
    to_an_engine_that_was_restarted,
    until_no_rank_reads_them,
    while_a_rank_leaves,
)


def all_others(rank: int, folder: Path) -> None:
    for case in OTHERS:
        case(rank, folder)
        ranks.meet(rank, folder, case.__name__, WORLD)


@pytest.mark.guarantee("memory", fault="shards of two ranks that move, or cannot be opened")
@pytest.mark.timeout(240)
def test_shards_in_other_cases(tmp_path: Path) -> None:
    ranks.run(all_others, tmp_path, WORLD, COLLECTIVE_TIMEOUT_S)


@pytest.mark.guarantee("all-or-none", fault="shards of two ranks, read where they lie")
@pytest.mark.parametrize(
    ("dtype", "count"), [(torch.bfloat16, 1), (torch.float32, 1), (torch.bfloat16, 2)]
)
@pytest.mark.timeout(240)
def test_shards_are_read_in_place(tmp_path: Path, dtype: torch.dtype, count: int) -> None:
    worker: Callable[[int, Path], None] = partial(read_in_place, dtype=dtype, count=count)
    ranks.run(worker, tmp_path, WORLD, COLLECTIVE_TIMEOUT_S)
