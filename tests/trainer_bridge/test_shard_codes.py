"""Codes that the ranks of a trainer make of their shards, once for all engines that read them."""

import logging
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from sgl_fp8rl.formats import QUANTIZED
from sgl_fp8rl.ops import weight_quant_triton
from sgl_fp8rl.protocol.cuda_memory import CudaMemoryError, Handle
from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.place import here
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from tests import oracle
from tests.sgl_fp8rl.receiver import toy
from tests.trainer_bridge import fake_ipc, ranks
from tests.trainer_bridge.test_close import looping
from tests.trainer_bridge.test_packer import FakeStatus, at, compile_in_torch
from tests.trainer_bridge.test_placed_shards import CODED, GpuEngine, Trainer, mapped_bytes
from trainer_bridge import close
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.session.kept import KEPT
from trainer_bridge.shards import placed_shards, shard_codes
from trainer_bridge.shards.code_pieces import codes_wanted, pieces_of_codes
from trainer_bridge.shards.codes_memory import CodesMemory
from trainer_bridge.shards.placed_shards import CodesWanted, PlacedShards, Shards
from trainer_bridge.shards.shard_codes import ShardCodes
from trainer_bridge.sources.parameters import Named
from trainer_bridge.transfer.layout import sources_for
from trainer_bridge.transport.cuda_ipc import Placement
from trainer_bridge.updates.update import UpdateResult, update

Tensor = torch.Tensor
WORLD = 2
COLLECTIVE_TIMEOUT_S = 30
OTHER = "GPU-00000000-0000-0000-0000-000000000001"


# -- where codes and scales of HF tensors lie

LAYOUT: dict[str, Any] = {
    "dtype": "bfloat16",
    "fp32": [],
    "skipped": [],
    "tied": None,
    "formats": {},
    "gpus": [OTHER],
    "visible_gpus": [fake_ipc.GPU, OTHER],
    "through_host": False,
    "is_remote": False,
}
EXPERTS = "model.layers.0.mlp.experts."


class Lying:
    """Shards of one parameter on simulated ranks, each tensor in an allocation of its own."""

    def __init__(
        self, name: str, whole: Tensor, held: list[tuple[int, int]], kept: list[str]
    ) -> None:
        self.named: Named = [(name, whole)]
        self.layout = {**LAYOUT, "formats": {QUANTIZED.name: kept}}
        row = whole[0].numel()
        self.shards = [whole[start:stop].clone() for start, stop in held]
        self.own = [
            PlacedShards(
                here(),
                ((start * row, stop * row),),
                {0: 0} if start < stop else {},
                placed([shard], f"plain {rank}"),
            )
            for rank, ((start, stop), shard) in enumerate(zip(held, self.shards, strict=True))
        ]
        self.plain = Shards(self.own, [whole.numel()])

    @property
    def wanted(self) -> CodesWanted | None:
        return codes_wanted(self.plain, self.named, "qwen3_moe", [(self.layout, 1)])

    def codes(self) -> dict[str, Tensor]:
        """Codes and scales of each HF tensor, put together from the ranks' pieces, as bytes."""
        assert self.wanted is not None
        made = []
        for own, shard in zip(self.own, self.shards, strict=True):
            if 0 in own.spots:
                codes = ShardCodes(self.wanted, self.named, own, {0: shard})
                codes.start({0: shard})
                codes.check()
                made.append(codes)
        codes_of_ranks = Shards(
            [each.placed for each in made], [t.numel() for _, t in made[0].whole]
        )
        both = self.plain.with_codes(self.wanted, codes_of_ranks)
        planned = sources_for(self.named, "qwen3_moe", self.layout)
        found = pieces_of_codes(both, self.named, "qwen3_moe", self.layout, planned)
        addresses = [handle.ipc for handle in codes_of_ranks.handles]
        parts: dict[str, Tensor] = {}
        for name, pieces in found[0].items():
            assert [p.rows[0] for p in pieces] == [0, *(p.rows[1] for p in pieces[:-1])], name
            width, dtype = self._width(name), torch.uint8
            parts[name] = torch.cat(
                [
                    at(int(addresses[p.segment]) + p.offset, (p.rows[1] - p.rows[0]) * width, dtype)
                    for p in pieces
                ]
            )
        return parts

    def _width(self, name: str) -> int:
        cols = self.named[0][1].shape[-1]
        return -(-cols // 128) * 4 if name.endswith("_scale_inv") else cols


def placed(tensors: list[Tensor], seed: str = "") -> Placement:
    """Where tensors lie; the handle is the address."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    handles = tuple(Handle(str(each), 1 << 30, fake_ipc.GPU) for each in addresses)
    return Placement(
        (), (), handles, tuple((i, 0) for i in range(len(handles))), seed or str(handles)
    )


class TorchMemory:
    """``cuda_memory.DeviceMemory``."""

    def __init__(self, nbytes: int, device: int) -> None:
        self.tensor = torch.empty(nbytes, dtype=torch.uint8)

    def close(self) -> None:
        """Tensors free theirs."""


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_quant_triton, "compile_descriptors", compile_in_torch)
    monkeypatch.setattr(weight_quant_triton, "Status", FakeStatus)
    monkeypatch.setattr(shard_codes, "placement_of", placed)
    monkeypatch.setattr(shard_codes, "DeviceMemory", TorchMemory)


def drawn(*shape: int) -> Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    return noise * torch.logspace(-2, 2, shape[-2]).unsqueeze(1)


def hf_parts(name: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    if whole.dim() == 2:
        yield name, whole
        return
    half = whole.shape[1] // 2
    for expert, matrix in enumerate(whole):
        if name.endswith("gate_up_proj"):
            yield f"{EXPERTS}{expert}.gate_proj.weight", matrix[:half]
            yield f"{EXPERTS}{expert}.up_proj.weight", matrix[half:]
        else:
            yield f"{EXPERTS}{expert}.down_proj.weight", matrix


CASES = {
    "matrix": ("w", (512, 200), [(0, 256), (256, 512)]),
    "ragged end": ("w", (300, 128), [(0, 128), (128, 300)]),
    "a rank without": ("w", (256, 128), [(0, 128), (128, 256), (256, 256)]),
    "experts": (EXPERTS + "gate_up_proj", (4, 512, 192), [(0, 3), (3, 4)]),
    "experts of ragged rows": (EXPERTS + "down_proj", (3, 200, 128), [(0, 2), (2, 3)]),
}


@pytest.mark.usefixtures("in_torch")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_pieces_are_the_oracles_codes(case: str, dtype: torch.dtype) -> None:
    name, shape, held = CASES[case]
    whole = drawn(*shape).to(dtype)
    wanted = dict(hf_parts(name, whole.to(torch.bfloat16)))
    lying = Lying(name, whole, held, list(wanted))
    found = lying.codes()
    assert found.keys() == {n + suffix for n in wanted for suffix in ("", "_scale_inv")}
    for part, tensor in wanted.items():
        codes, scales = oracle.quantize_weight(tensor.float().numpy())
        assert bytes(found[part].numpy()) == codes.tobytes(), part
        assert bytes(found[part + "_scale_inv"].numpy()) == scales.tobytes(), part
    if dtype == torch.float32:  # the control: without the rounding to BF16
        codes, _ = oracle.quantize_weight(next(hf_parts(name, whole))[1].numpy())
        assert bytes(found[next(iter(wanted))].numpy()) != codes.tobytes()


@pytest.mark.parametrize(
    ("name", "shape", "held"),
    [
        ("w", (256, 128), [(0, 64), (64, 256)]),
        ("w", (300, 128), [(0, 150), (150, 300)]),
        (EXPERTS + "gate_up_proj", (4, 400, 128), [(0, 2), (2, 4)]),
        (EXPERTS + "gate_up_proj", (4, 128, 128), [(0, 2), (2, 4)]),
    ],
)
def test_cut_blocks_stay_as_they_are(
    name: str, shape: tuple[int, ...], held: list[tuple[int, int]]
) -> None:
    """Those of gate and up too, whose rows share a block of the parameter."""
    whole = drawn(*shape)
    assert Lying(name, whole, held, [n for n, _ in hf_parts(name, whole)]).wanted is None


def test_who_gains() -> None:
    lying = Lying("w", drawn(256, 128), [(0, 128), (128, 256)], ["w"])

    def wanted(engines: int = 1, **changes: Any) -> bool:
        layout = lying.layout | changes
        return codes_wanted(lying.plain, lying.named, None, [(layout, engines)]) is not None

    own = [fake_ipc.GPU]
    assert wanted() and wanted(gpus=[fake_ipc.GPU, OTHER]) and wanted(gpus=own, engines=2)
    assert not wanted(gpus=own), "each GPU reads what it holds, once"
    assert not wanted(visible_gpus=[OTHER]) and not wanted(visible_gpus=[])
    assert not wanted(visible_gpus=[]) and not wanted(fp32=None)
    assert not wanted(formats={}) and not wanted(formats={QUANTIZED.name: ["v"]})
    codes: Named = [("w", lying.named[0][1].to(QUANTIZED.dtypes[0]))]
    assert codes_wanted(lying.plain, codes, None, [(lying.layout, 1)]) is None, "of fp8_forward"


def test_codes_of_inference_mode_are_made_again_outside_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_quant_triton, "compile_descriptors", lambda *_: [])
    weights = [drawn(128, 128)]
    memory = CodesMemory(weights, torch.bfloat16)
    with torch.inference_mode():
        memory.launch(weights)
    memory.restart()
    memory.launch()
    assert memory.bad() is None


# -- updates of engines


class Elsewhere(GpuEngine):
    """On other GPUs than the trainer's.

    Args:
        formats: what a trainer hears, in the place of what is FP8.
    """

    def __init__(self, writable: list[tuple[int, int]], formats: Any = None) -> None:
        super().__init__(writable)
        self.visible_gpus = [fake_ipc.GPU, OTHER]
        self.formats = formats

    def control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
        reply = super().control(message)
        if message["op"] == "layout":
            reply = {**reply, "gpus": [OTHER]}
            if self.formats is not None:
                reply["formats"] = self.formats
        return reply


class Job:
    """One rank of a trainer, and on the first rank engines."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        rank: int,
        make: Callable[[list[tuple[int, int]]], list[Any]],
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        logging.disable(logging.CRITICAL)
        self.memories, interpreter = fake_ipc.install(patch)
        self.rank, self.trainer = rank, Trainer(self.memories, rank, dtype)
        self.engines = make(interpreter.writable) if rank == 0 else []
        self.launches = 0
        launch = CodesMemory.launch

        def counted(memory: CodesMemory, weights: Any = None) -> None:
            self.launches += 1
            launch(memory, weights)

        patch.setattr(CodesMemory, "launch", counted)
        self._versions = count()

    def step_to(self, version: int) -> UpdateResult:
        self._versions = count(version)
        return self.step()

    def step(self, **options: Any) -> UpdateResult:
        """An update to other weights; all engines hold the oracle's bytes."""
        version = next(self._versions)
        tensors = toy.checkpoint(version)
        named = self.trainer.become(tensors)
        result = update(named, self.engines or None, version=version, **options)
        assert not self.memories.torn
        assert all(engine.holds(tensors) for engine in self.engines), version
        return result


def one(writable: list[tuple[int, int]]) -> list[Any]:
    return [Elsewhere(writable)]


def two(writable: list[tuple[int, int]]) -> list[Any]:
    """On the trainer's GPU."""
    return [GpuEngine(writable) for _ in range(2)]


def to_engines(rank: int, folder: Path) -> None:
    """From the third update on each rank quantizes once; where shards move, they are gathered."""
    for make, dtype in ((one, torch.bfloat16), (one, torch.float32), (two, torch.bfloat16)):
        with pytest.MonkeyPatch.context() as patch:
            job = Job(patch, rank, make, dtype)
            tensors = toy.checkpoint()
            plain, coded = (mapped_bytes(tensors, each, dtype.itemsize) for each in ((), CODED))
            for moves in (False, True):
                if moves and rank == 1:
                    job.trainer.move()
                for read in (0, plain, coded, coded):
                    before, made = job.launches, len(job.memories.made)
                    result = job.step()
                    assert result.mapped_bytes == read
                    assert result.bytes == read or not read
                    assert ("quantize" in result.seconds) == (read == coded)
            assert job.launches == before + 1
            assert len(job.memories.made) == made
        ranks.meet(rank, folder, f"{make.__name__}-{dtype}", WORLD)


def to_the_trainers_gpus(rank: int, folder: Path) -> None:
    """The control: one engine there reads BF16, and nothing is quantized before."""
    with pytest.MonkeyPatch.context() as patch:
        job = Job(patch, rank, lambda writable: [GpuEngine(writable)])
        results = [job.step() for _ in range(3)]
        whole = mapped_bytes(toy.checkpoint(), set())
        assert [each.mapped_bytes for each in results] == [0, whole, whole]
        assert not job.launches and "quantize" not in results[-1].seconds


class LateGpu:
    """Quantizes what was queued when it is waited for, or never."""

    def __init__(self, patch: pytest.MonkeyPatch, works: bool) -> None:
        self._queued: list[Callable[[], None]] = []
        self._launch, self._bad, self._works = CodesMemory.launch, CodesMemory.bad, works
        patch.setattr(
            CodesMemory, "launch", lambda memory, weights=None: self._queue(memory, weights)
        )
        patch.setattr(CodesMemory, "bad", lambda memory: self._wait(memory))

    def _queue(self, memory: CodesMemory, weights: Any) -> None:
        self._queued.append(lambda: self._launch(memory, weights))

    def _wait(self, memory: CodesMemory) -> int | None:
        if not self._works:
            return None
        while self._queued:
            self._queued.pop(0)()
        return self._bad(memory)


def behind_a_gpu(rank: int, folder: Path) -> None:
    """Engines read what all ranks' GPUs have made by then, whichever is the last."""
    for late in range(WORLD):
        for works in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                job = Job(patch, rank, one)
                for _ in range(3):
                    job.step()
                if rank == late:
                    LateGpu(patch, works)
                if works or rank > 0:
                    job.step()
                else:  # the control: codes of the update before
                    with pytest.raises(AssertionError):
                        job.step()
            ranks.meet(rank, folder, f"{late}-{works}", WORLD)


def of_faults(rank: int, folder: Path) -> None:
    """A rank refuses NaN, or cannot launch, before an engine writes anything: the version before is
    served on."""
    with pytest.MonkeyPatch.context() as patch:
        job = Job(patch, rank, lambda writable: [Elsewhere(writable) for _ in range(2)])
        for _ in range(3):
            job.step()
        serves = [toy.contents(w.model) for e in job.engines for w in e.ranks]
        bad = toy.checkpoint(3)
        bad["mlp.experts.1.up.weight"][-1, -1] = torch.nan  # rank 1 holds it
        with pytest.raises(Exception, match=r"on rank 1 .*experts\.1\.up\.weight holds NaN"):
            update(job.trainer.become(bad), job.engines or None, version=3)
        for weights, before in zip([w for e in job.engines for w in e.ranks], serves, strict=True):
            assert toy.same(toy.contents(weights.model), before)
            assert (weights.state, weights.policy.version) == (State.SERVING, 2)
        assert [job.step().mapped_bytes > 0 for _ in range(3)] == [False, True, True]
        with pytest.MonkeyPatch.context() as fault:
            if rank == 1:
                fault.setattr(CodesMemory, "launch", lambda *_: 1 / 0)
            with pytest.raises(Exception, match=r"on rank 1 .*division by zero"):
                job.step()
        assert [w.state for e in job.engines for w in e.ranks] == [State.SERVING] * 4 * (rank == 0)
        assert [job.step().mapped_bytes > 0 for _ in range(2)] == [False, True]


def of_other_layouts(rank: int, folder: Path) -> None:
    """An engine keeps fewer tensors in FP8 than before, and one joins that keeps none so."""
    with pytest.MonkeyPatch.context() as patch:
        joining: list[Any] = []

        def make(writable: list[tuple[int, int]]) -> list[Any]:
            joining.append(Elsewhere(writable, formats={}))
            return [Elsewhere(writable)]

        job = Job(patch, rank, make)
        tensors = toy.checkpoint()
        found = [job.step().mapped_bytes for _ in range(3)]
        assert found == [0, mapped_bytes(tensors, set()), mapped_bytes(tensors, CODED)]
        some = {"attn.q.weight", "mlp.experts.0.up.weight"}
        for engine in job.engines:
            engine.formats = {QUANTIZED.name: sorted(some)}
        bad = toy.checkpoint(3) | {
            "norm.weight": torch.full_like(tensors["norm.weight"], torch.nan)
        }
        with pytest.raises(Exception, match="NaN"):  # the layout is asked for again
            update(job.trainer.become(bad), job.engines or None, version=3)
        job.step_to(4)
        assert job.step().mapped_bytes == mapped_bytes(tensors, set())
        assert [job.step().mapped_bytes for _ in range(2)] == [mapped_bytes(tensors, some)] * 2
        job.engines += joining
        launches = job.launches
        for _ in range(3):  # it reads BF16, which is more
            result = job.step()
        assert result.mapped_bytes == mapped_bytes(tensors, set())
        assert job.launches == launches + 3


def beside_what_is_gathered(rank: int, folder: Path) -> None:
    """One tensor is whole on each rank, and one is cut by columns."""
    with pytest.MonkeyPatch.context() as patch:
        job = Job(patch, rank, one)
        others = {"norm.weight", "attn.o.weight"}
        columns = torch.empty(toy.HIDDEN, toy.HEADS // WORLD, dtype=torch.bfloat16)
        mesh = cast(DTensor, job.trainer.named["attn.o.weight"]).device_mesh
        cut = DTensor.from_local(columns, mesh, (Shard(1),))
        for version in range(4):
            tensors = toy.checkpoint(version)
            columns.copy_(tensors["attn.o.weight"].chunk(WORLD, 1)[rank])
            beside = {"norm.weight": tensors["norm.weight"], "attn.o.weight": cut}
            named = job.trainer.become({n: t for n, t in tensors.items() if n not in others})
            result = update({**named, **beside}, job.engines or None, version=version)
            assert all(engine.holds(tensors) for engine in job.engines), version
        read = {name: tensor for name, tensor in tensors.items() if name not in others}
        assert result.mapped_bytes == mapped_bytes(read, CODED) and job.launches


def in_bf16_without_memory(rank: int, folder: Path) -> None:
    """One rank has no room for codes: none makes any from then on."""
    with pytest.MonkeyPatch.context() as patch:
        job = Job(patch, rank, one)

        def full(nbytes: int, device: Any) -> Any:
            raise CudaMemoryError("out of memory")

        if rank == 1:
            patch.setattr(shard_codes, "DeviceMemory", full)
        whole = mapped_bytes(toy.checkpoint(), set())
        warnings: list[str] = []
        patch.setattr(
            shard_codes.logger, "warning", lambda text, *args: warnings.append(text % args)
        )
        results = [job.step() for _ in range(5)]
        assert [each.mapped_bytes for each in results] == [0, *[whole] * 4]
        assert len(warnings) == (rank == 0), warnings
        assert job.launches <= 2, "only where it was not known yet"


def with_kv_scales(rank: int, folder: Path) -> None:
    class KVEngine(Elsewhere):
        def control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
            cache = {"kv_cache": {"layers": 2, "kv_heads": 3}} if message["op"] == "layout" else {}
            return {**super().control(message), **cache}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            EngineWeights, "kv_scales_in", lambda self, m: frozenset({KV_SCALES} & m.tensors.keys())
        )
        job = Job(patch, rank, lambda writable: [KVEngine(writable)])
        read = mapped_bytes(toy.checkpoint(), CODED)
        for _ in range(4):
            result = job.step(kv_scales=torch.ones(2, 2, 3))
        assert result.mapped_bytes >= read and job.launches


def as_long_as_engines_have_them(rank: int, folder: Path) -> None:
    """Codes are freed once no engine has them open: neither one that the trainer no longer names,
    nor one that was left out of an update. ``Job.step`` checks that none is freed before."""
    with pytest.MonkeyPatch.context() as patch:
        job = Job(patch, rank, two)
        made = [job.step() and len(job.memories.made) for _ in range(3)]
        assert made[2] == made[1] + 1
        gone, job.engines = job.engines[:1], job.engines[1:]
        for _ in range(3):  # the first of these still reads codes, the others BF16
            assert job.step().mapped_bytes
            assert len(job.memories.made) == made[2]
        for engine in gone:
            with looping(engine):
                close(engine)
        job.step()
        assert len(job.memories.made) == made[1]
    ranks.meet(rank, folder, "closed", WORLD)
    with pytest.MonkeyPatch.context() as patch:
        job = Job(patch, rank, lambda writable: [Elsewhere(writable) for _ in range(2)])
        for _ in range(3):
            job.step()
        codes, engines = KEPT.codes._codes, job.engines
        with pytest.MonkeyPatch.context() as fault:
            for engine in engines[1:]:
                fault.setattr(engine, "control", _busy(engine.control))
            job.engines = engines[:1]  # which are compared
            if rank == 1:
                job.trainer.move()
            named = job.trainer.become(toy.checkpoint(3))
            result = update(named, engines or None, version=3, require=1)
            assert len(result.failed) == 1 and not job.memories.torn
        assert codes in KEPT.codes._retired
        job.engines = engines
        job.step_to(4)
        assert codes not in KEPT.codes._retired


def _busy(control: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(message: dict[str, Any], timeout_s: float = 9.0) -> Any:
        if message["op"] == "begin":
            raise EngineError("another update runs")
        return control(message)

    return refuse


def until_the_last_engine_is_closed(rank: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        job = Job(patch, rank, one)
        made = [job.step() and len(job.memories.made) for _ in range(3)]
        assert made[2] == made[1] + 1
        for engine in job.engines:
            with looping(engine):
                close(engine)
        ranks.meet(rank, folder, "left", WORLD)
        if rank == 1:
            assert len(job.memories.made) == made[2]
            close(None)
        assert len(job.memories.made) == made[1] and not job.memories.torn
        assert job.step().mapped_bytes == mapped_bytes(toy.checkpoint(), CODED)


def where_shards_move_at_each_update(rank: int, folder: Path) -> None:
    """Nothing is prepared that is not used."""
    with pytest.MonkeyPatch.context() as patch:
        job = Job(patch, rank, one)
        patch.setattr(placed_shards, "Shards", None)
        patch.setattr(shard_codes, "codes_wanted", None)
        for _ in range(3):
            job.trainer.move()
            assert job.step().mapped_bytes == 0
        assert not job.launches


def without_a_decision(rank: int, folder: Path) -> None:
    """It only makes updates faster: they do not fail with it."""
    with pytest.MonkeyPatch.context() as patch:
        job = Job(patch, rank, one)
        patch.setattr(shard_codes, "codes_wanted", lambda *_: 1 / 0)
        whole = mapped_bytes(toy.checkpoint(), set())
        assert [job.step().mapped_bytes for _ in range(3)] == [0, whole, whole]
        assert not job.launches


CASES_OF_RANKS = (
    to_engines,
    as_long_as_engines_have_them,
    until_the_last_engine_is_closed,
    where_shards_move_at_each_update,
    without_a_decision,
    to_the_trainers_gpus,
    behind_a_gpu,
    of_faults,
    of_other_layouts,
    beside_what_is_gathered,
    with_kv_scales,
    in_bf16_without_memory,  # the last one: a process does not try again
)


def each_case(rank: int, folder: Path) -> None:
    for case in CASES_OF_RANKS:
        case(rank, folder)
        ranks.meet(rank, folder, case.__name__, WORLD)


@pytest.mark.guarantee("all-or-none", fault="codes that trainer ranks make, NaN in one of them")
@pytest.mark.timeout(300)
def test_codes_of_two_ranks(tmp_path: Path) -> None:
    ranks.run(each_case, tmp_path, WORLD, COLLECTIVE_TIMEOUT_S, join_s=270.0)
