"""Shards that engines read where they lie: what ranks tell each other, and updates by it."""

import time
from collections.abc import Callable
from importlib import import_module
from itertools import count, pairwise, product
from pathlib import Path
from typing import Any, cast

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.distributed.tensor import DTensor, Replicate

from sgl_fp8rl.protocol.cuda_memory import Handle
from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.place import HostMemory, here
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from sgl_fp8rl.receiver.session import Session
from tests.sgl_fp8rl.receiver import toy
from tests.trainer_bridge import fake_ipc, ranks
from tests.trainer_bridge.calls import before
from tests.trainer_bridge.shards_job import (
    CODED,
    GPU,
    PLAIN,
    WORLD,
    Elsewhere,
    GpuEngine,
    Job,
    Make,
    Trainer,
    mapped_bytes,
    run,
)
from tests.trainer_bridge.test_update import holds
from trainer_bridge.ranks.collective import Leader
from trainer_bridge.session.kept import KEPT
from trainer_bridge.shards import placed_shards
from trainer_bridge.shards.placed_shards import PlacedShards, ShardRegistry, Shards
from trainer_bridge.sources.parameters import Named
from trainer_bridge.transfer.packer import QuantizePacker
from trainer_bridge.transport.cuda_ipc import Placement
from trainer_bridge.updates.update import update
from trainer_bridge.ways import sender

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
    assert registry.assemble(["a"], NAMED) is None, "it was never heard"
    assert registry.assemble([told("a"), told("b")], NAMED) is None
    assert not registry._shards, "nothing is made of what may move at each update"
    shards = registry.assemble(["a", "b"], NAMED)
    assert shards is not None and shards.seeds == ("a", "b")
    assert registry.assemble(["a", "b"], NAMED) is shards
    assert registry.assemble(["a", told("c")], NAMED) is None, "it moved on one rank"
    assert registry.assemble(["a", None], NAMED) is None
    again = registry.assemble(["a", "c"], NAMED)
    assert again is not None and again.seeds == ("a", "c")


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


BAD = {"mlp.experts.1.up.weight": torch.nan}
"""Rank 1 holds it."""
READERS: tuple[tuple[Make, ...], ...] = (GpuEngine,), (GpuEngine, GpuEngine), (Elsewhere,)


def read_in_place(_: pytest.MonkeyPatch, rank: int, folder: Path) -> None:
    """From the second update on; from the third on each rank quantizes once for several engines,
    and for those on other GPUs. Where shards move, or are cast, they are gathered."""
    for number, (make, dtype) in enumerate(product(READERS, (torch.bfloat16, torch.float32))):
        if make == (GpuEngine, GpuEngine) and dtype == torch.float32:
            continue
        with pytest.MonkeyPatch.context() as patch:
            job = Job(patch, rank, *make, dtype=dtype)
            plain = mapped_bytes(toy.checkpoint(), (), dtype.itemsize)
            codes = mapped_bytes(toy.checkpoint(), CODED, dtype.itemsize)
            coded = plain if make == (GpuEngine,) else codes
            for change in ("", "moved"):
                if change and rank == 1:
                    job.trainer.move()
                for read in (0, plain, coded, coded):
                    before, made = job.launches, len(job.memories.made)
                    result = job.step()
                    assert len(job.gathered) == (0 if read else len(toy.SHAPES)), result
                    assert result.mapped_bytes == read
                    assert result.bytes == read or not read
                    is_coded = read == coded != plain
                    assert ("quantize" in result.seconds) == is_coded
                assert job.launches == before + is_coded
                assert len(job.memories.made) == made
            assert not fake_ipc.MappedFile.opened or rank == 0

            job.fails(r"experts\.1\.up\.weight holds NaN", **BAD)
            assert job.read(2) == [0, plain]
            for engine in job.engines[-1:]:
                engine.visible_gpus = ["GPU of another container"]
            job.fails("NaN", **BAD)  # the layout is asked for again
            assert job.read(2) == [0, 0]
        ranks.meet(rank, folder, f"readers-{number}", WORLD)


def while_they_are_cast(patch: pytest.MonkeyPatch, rank: int, folder: Path) -> None:
    job = Job(patch, rank, GpuEngine)
    assert job.read(2) == [0, PLAIN]
    job.trainer = Trainer(job.memories, rank, torch.float32)
    assert job.read(2) == [0, mapped_bytes(toy.checkpoint(), (), 4)]


def under_other_names(patch: pytest.MonkeyPatch, rank: int, folder: Path) -> None:
    """The same memory in the same order: what is read is what the names say."""
    job, tensors, versions = Job(patch, rank, GpuEngine), toy.checkpoint(0), count()

    def send(named: Any, wanted: toy.Tensors = tensors) -> None:
        job.check(update(named, job.engines or None, version=next(versions)), wanted)

    for _ in range(2):
        send(job.trainer.become(tensors))
    swap = {"attn.q.weight": "attn.k.weight", "attn.k.weight": "attn.q.weight"}
    for _ in range(2):
        named, wanted = (
            {swap.get(name, name): each for name, each in held.items()}
            for held in (job.trainer.named, tensors)
        )
        send(named, wanted)
    # shards that stay, at other places among the parameters
    sharded = [(name, s) for name, s in job.trainer.named.items() if name != "norm.weight"]
    for number in range(6):
        at = 3 * (number % 3)
        send([*sharded[:at], ("norm.weight", tensors["norm.weight"]), *sharded[at:]])


def with_kv_scales(
    patch: pytest.MonkeyPatch, rank: int, folder: Path, make: Make = GpuEngine
) -> None:
    """Engines with an FP8 KV cache, as far as a trainer sees."""
    patch.setattr(
        EngineWeights, "kv_scales_in", lambda self, m: frozenset({KV_SCALES} & m.tensors.keys())
    )
    job = Job(patch, rank, make)
    for engine in job.engines:
        engine.told["kv_cache"] = {"layers": 2, "kv_heads": 3}
    results = [job.step(kv_scales=torch.ones(2, 2, 3)) for _ in range(4)]
    assert [each.mapped_bytes > 0 for each in results] == [False, True, True, True]
    assert bool(job.launches) == (make is Elsewhere)


def with_kv_scales_beside_codes(patch: pytest.MonkeyPatch, rank: int, folder: Path) -> None:
    with_kv_scales(patch, rank, folder, Elsewhere)


def of_a_gpu_that_cannot_be_opened(patch: pytest.MonkeyPatch, rank: int, folder: Path) -> None:
    """That of the second rank: weights are gathered on the first one's, which can."""
    job = Job(patch, rank, GpuEngine)
    fake_ipc.refuse_others(patch)
    assert job.read(3) == [0, 0, 0]
    assert not any(KEPT.connection_to(engine).through_host for engine in job.engines)


def to_an_engine_that_was_restarted(patch: pytest.MonkeyPatch, rank: int, folder: Path) -> None:
    """With dummy weights: it does not know yet what it keeps in FP8."""
    job = Job(patch, rank, GpuEngine)
    job.read(2)
    if rank == 0:
        job.engines = [GpuEngine(job.writable)]
        for weights in job.engines[0].ranks:
            weights.table, weights.state = None, State.QUARANTINED
    job.read(3)


def until_no_rank_reads_them(patch: pytest.MonkeyPatch, rank: int, folder: Path) -> None:
    """A rank of the engine fails; the trainer's ranks go on when the others have ended."""
    job = Job(patch, rank, GpuEngine)
    job.read(2)
    reading = folder / "reading"

    def fail_or_linger(self: Session, index: int) -> None:
        if self.writer.is_mapped(index):
            if self.weights is job.engines[0].ranks[0]:
                raise ValueError("a fault of one rank")
            reading.touch()
            time.sleep(1.0)
            reading.unlink()

    before(patch, Session, "write", fail_or_linger)
    job.fails("a fault of one rank")
    assert not reading.exists()


def while_a_rank_leaves(patch: pytest.MonkeyPatch, rank: int, folder: Path) -> None:
    """It hears an alarm of its own, and its optimizer goes on while the engine reads."""
    job, share, heard = Job(patch, rank, GpuEngine), Leader.share, count()
    job.read(2)

    def alarmed(self: Leader, value: Any) -> Any:
        if next(heard) == 1:  # the first one began the update
            raise InterruptedError
        return share(self, value)

    with pytest.MonkeyPatch.context() as now:
        # the package's ``update`` is the function
        now.setattr(import_module("trainer_bridge.updates.update"), "PRESENCE_S", 3.0)
        if rank == 0:
            job.fails("another rank did not call it", TimeoutError)
            assert {weights.state for weights in job.engines[0].ranks} == {State.QUARANTINED}
        else:
            now.setattr(Leader, "share", alarmed)
            job.fails("", InterruptedError)
    job.read(2)


# -- what a trainer does to its shards between two updates

FIRST, SECOND = "attn.q.weight", "attn.k.weight"
"""Of one shape."""


class Held:
    """The parameters of a trainer, which it may change."""

    def __init__(self, memories: fake_ipc.Memories, rank: int) -> None:
        self._memories, self._rank = memories, rank
        self.named = Trainer(memories, rank).named
        self._kept: list[Any] = []

    def shard(self, name: str) -> torch.Tensor:
        shard: torch.Tensor = cast(Any, self.named[name])._local_tensor
        return shard

    def elsewhere(self) -> torch.Tensor:
        """A copy of the first shard."""
        shard = self.shard(FIRST)
        content = self._memories.allocate(shard.nbytes)
        return content.view(shard.dtype).view(shard.shape).copy_(shard)

    def put(self, **shards: torch.Tensor) -> None:
        for name, shard in shards.items():
            cast(Any, self.named[name])._local_tensor = shard

    def read_as(self, data: torch.Tensor) -> None:
        self.shard(FIRST).data = data

    def cast(self) -> None:
        self.named = Trainer(self._memories, self._rank, torch.float32).named

    def hold_it_whole(self) -> None:
        """In the same memory, with fewer rows in all."""
        mesh = cast(DTensor, self.named[FIRST]).device_mesh
        self.named[FIRST] = DTensor.from_local(
            self.shard(FIRST), mesh, (Replicate(),), run_check=False
        )

    def name(self, name: str, tensor: torch.Tensor) -> None:
        self.named[name] = tensor

    def allocate_again_at_the_address(self) -> None:
        address, made = self.shard(FIRST).data_ptr(), self._memories.made
        self._kept.append(made[address])
        made[address] = HostMemory(self.shard(FIRST).nbytes)


CHANGES: tuple[Callable[[Held], Any], ...] = (
    lambda held: held.put(**{FIRST: held.elsewhere()}),
    lambda held: held.read_as(held.elsewhere()),
    lambda held: held.put(**{FIRST: held.shard(SECOND), SECOND: held.shard(FIRST)}),
    lambda held: held.read_as(held.shard(FIRST).view(torch.float16)),
    Held.cast,
    Held.hold_it_whole,
    lambda held: held.name("renamed.weight", held.named.pop(SECOND)),
    lambda held: held.name(FIRST, held.named.pop(FIRST)),  # as the last one
    lambda held: held.name("added.weight", torch.ones(3)),
    lambda held: held.name("tied.weight", held.named[FIRST]),
    lambda held: held.named.pop("norm.weight"),
    Held.allocate_again_at_the_address,
)
"""The parameters are left as they are otherwise."""


def told_anew(patch: pytest.MonkeyPatch, rank: int, folder: Path) -> None:
    memories, _ = fake_ipc.install(patch)
    held, registry = Held(memories, rank), ShardRegistry()

    def place() -> PlacedShards | str | None:
        return registry.place(list(held.named.items()))

    assert isinstance(place(), PlacedShards)
    for number, change in enumerate(CHANGES):
        known = place()
        assert isinstance(known, str), number
        assert place() == known, "the control: nothing has changed"
        change(held)
        assert isinstance(place(), PlacedShards), number


@pytest.mark.guarantee("memory", fault="shards of two ranks that move, or cannot be opened")
@pytest.mark.guarantee("memory", fault="shards that are swapped, cast, tied or moved")
@pytest.mark.guarantee("all-or-none", fault="shards of two ranks, read where they lie")
@pytest.mark.timeout(300)
def test_shards_are_read_in_place(tmp_path: Path) -> None:
    cases = (
        told_anew,
        read_in_place,
        while_they_are_cast,
        under_other_names,
        with_kv_scales,
        with_kv_scales_beside_codes,
        of_a_gpu_that_cannot_be_opened,
        to_an_engine_that_was_restarted,
        until_no_rank_reads_them,
        while_a_rank_leaves,
    )
    run(cases, tmp_path, join_s=270.0)


# -- parameters on one GPU that lie elsewhere at each update: the bucket is filled chunk by chunk


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> tuple[fake_ipc.Memories, GpuEngine]:
    """Memory that trainer and engine share, and an engine."""
    memories, interpreter = fake_ipc.install(monkeypatch)
    monkeypatch.setattr(sender, "can_be_mapped", memories.holds)
    return memories, GpuEngine(interpreter.writable)


def moved(memories: fake_ipc.Memories, tensors: toy.Tensors, shift: int = 0) -> toy.Tensors:
    """The same values in new memory, so many bytes behind its start."""
    found = {}
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        content = memories.allocate(raw.numel() + shift)[shift:]
        found[name] = content.copy_(raw).view(tensor.dtype).view(tensor.shape)
    return found


def refuse(*_: Any) -> None:
    raise AssertionError("a parameter was put in by itself")


def test_no_parameter_is_put_in_by_itself(
    shared: tuple[fake_ipc.Memories, GpuEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    memories, engine = shared
    engine.bucket_bytes = 1 << 17
    monkeypatch.setattr(QuantizePacker, "put", refuse)
    for version in range(3):
        tensors = toy.checkpoint(version)
        result = update(moved(memories, tensors), engine, version=version)
        assert holds(engine, tensors)
        assert result.mapped_bytes == 0
    writer = list(engine.ranks[0]._writers.values())[-1]
    assert len(writer.chunks) > 4

    bad = toy.checkpoint(3)
    bad["mlp.experts.1.up.weight"][-1, -1] = torch.nan
    with pytest.raises(Exception, match=r"experts\.1\.up\.weight holds NaN"):
        update(moved(memories, bad), engine, version=3)
    update(moved(memories, tensors), engine, version=4)
    assert holds(engine, tensors)


def test_what_does_not_lie_as_it_is_sent_is_put_in_by_itself(
    shared: tuple[fake_ipc.Memories, GpuEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the control of the test above: the calls that it refuses are made here."""
    memories, engine = shared
    tensors = toy.checkpoint(0)
    update(moved(memories, tensors, shift=4), engine, version=0)  # not aligned
    assert holds(engine, tensors)
    mixed = moved(memories, tensors)
    mixed["norm.weight"] = mixed["norm.weight"].clone()  # memory that is not shared
    update(mixed, engine, version=1)
    assert holds(engine, tensors)
    monkeypatch.setattr(QuantizePacker, "put", refuse)
    with pytest.raises(AssertionError, match="by itself"):
        update(moved(memories, tensors, shift=4), engine, version=2)
