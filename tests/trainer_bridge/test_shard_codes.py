"""Codes that the ranks of a trainer make of their shards, once for all engines that read them."""

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from sgl_fp8rl.formats import QUANTIZED
from sgl_fp8rl.ops import weight_quant_triton
from sgl_fp8rl.protocol.cuda_memory import CudaMemoryError, Handle
from sgl_fp8rl.protocol.place import here
from sgl_fp8rl.protocol.states import State
from tests import oracle
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_gpu import FakeDeviceMemory
from tests.trainer_bridge import ranks
from tests.trainer_bridge.shards_job import (
    AS_CODES,
    CODED,
    GPU,
    OTHER,
    PLAIN,
    WORLD,
    Elsewhere,
    GpuEngine,
    Job,
    mapped_bytes,
    run,
)
from tests.trainer_bridge.test_close import looping
from tests.trainer_bridge.test_packer import at, without_triton
from tests.trainer_bridge.test_sender import layout
from tests.trainer_bridge.test_update import holds
from trainer_bridge import close
from trainer_bridge.session.kept import KEPT
from trainer_bridge.shards import placed_shards, shard_codes
from trainer_bridge.shards.code_pieces import codes_wanted, pieces_of_codes
from trainer_bridge.shards.codes_memory import CodesMemory
from trainer_bridge.shards.placed_shards import CodesWanted, PlacedShards, Shards
from trainer_bridge.shards.shard_codes import ShardCodes
from trainer_bridge.sources.parameters import Named
from trainer_bridge.transport.cuda_ipc import Placement
from trainer_bridge.updates.update import update

Tensor = torch.Tensor


# -- where codes and scales of HF tensors lie

LAYOUT = layout((OTHER,), visible_gpus=[GPU, OTHER])
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
        found = pieces_of_codes(both, self.named, "qwen3_moe", self.layout)
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
    handles = tuple(Handle(str(each), 1 << 30, GPU) for each in addresses)
    return Placement(
        (), (), handles, tuple((i, 0) for i in range(len(handles))), seed or str(handles)
    )


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    without_triton(monkeypatch)
    monkeypatch.setattr(shard_codes, "placement_of", placed)
    monkeypatch.setattr(shard_codes, "DeviceMemory", FakeDeviceMemory)


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

    own = [GPU]
    assert wanted() and wanted(gpus=[GPU, OTHER]) and wanted(gpus=own, engines=2)
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


# -- updates of engines; ``test_placed_shards.py`` has those without faults


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


def behind_a_gpu(_: pytest.MonkeyPatch, rank: int, folder: Path) -> None:
    """Engines read what all ranks' GPUs have made by then, whichever is the last."""
    for late, works in product(range(WORLD), (True, False)):
        with pytest.MonkeyPatch.context() as patch:
            job = Job(patch, rank, Elsewhere)
            job.read(3)
            if rank == late:
                LateGpu(patch, works)
            if works or rank > 0:
                job.step()
            else:  # the control: codes of the update before
                with pytest.raises(AssertionError):
                    job.step()
        ranks.meet(rank, folder, f"{late}-{works}", WORLD)


def of_faults(patch: pytest.MonkeyPatch, rank: int, folder: Path) -> None:
    """A rank refuses NaN, or cannot launch, before an engine writes anything: the version before is
    served on."""
    job = Job(patch, rank, Elsewhere, Elsewhere)
    job.read(3)
    job.fails(
        r"on rank 1 .*experts\.1\.up\.weight holds NaN", **{"mlp.experts.1.up.weight": torch.nan}
    )
    for engine in job.engines:
        assert holds(engine, toy.checkpoint(2))
        assert {(w.state, w.policy.version) for w in engine.ranks} == {(State.SERVING, 2)}
    assert job.read(3) == [0, PLAIN, AS_CODES]
    with pytest.MonkeyPatch.context() as fault:
        if rank == 1:
            fault.setattr(CodesMemory, "launch", lambda *_: 1 / 0)
        job.fails(r"on rank 1 .*division by zero")
    assert {w.state for e in job.engines for w in e.ranks} <= {State.SERVING}
    assert job.read(2) == [0, PLAIN]


def of_other_layouts(patch: pytest.MonkeyPatch, rank: int, folder: Path) -> None:
    """An engine keeps fewer tensors in FP8 than before, and one joins that keeps none so."""
    job = Job(patch, rank, Elsewhere, Elsewhere)
    joining = job.engines[1:]
    for engine in joining:
        engine.told["formats"] = {}
    del job.engines[1:]
    assert job.read(3) == [0, PLAIN, AS_CODES]
    some = {"attn.q.weight", "mlp.experts.0.up.weight"}
    for engine in job.engines:
        engine.told["formats"] = {QUANTIZED.name: sorted(some)}
    job.fails("NaN", **{"norm.weight": torch.nan})  # the layout is asked for again
    read = mapped_bytes(toy.checkpoint(), some)
    assert job.read(4) == [0, PLAIN, read, read]
    job.engines += joining
    launches = job.launches
    assert job.read(3)[-1] == PLAIN, "it reads BF16, which is more"
    assert job.launches == launches + 3


def beside_what_is_gathered(patch: pytest.MonkeyPatch, rank: int, folder: Path) -> None:
    """One tensor is whole on each rank, and one is cut by columns."""
    job, others = Job(patch, rank, Elsewhere), {"norm.weight", "attn.o.weight"}
    columns = torch.empty(toy.HIDDEN, toy.HEADS // WORLD, dtype=torch.bfloat16)
    mesh = cast(DTensor, job.trainer.named["attn.o.weight"]).device_mesh
    cut = DTensor.from_local(columns, mesh, (Shard(1),))
    for version in range(4):
        tensors = toy.checkpoint(version)
        columns.copy_(tensors["attn.o.weight"].chunk(WORLD, 1)[rank])
        beside = {"norm.weight": tensors["norm.weight"], "attn.o.weight": cut}
        named = job.trainer.become({n: t for n, t in tensors.items() if n not in others})
        result = update({**named, **beside}, job.engines or None, version=version)
        job.check(result, tensors)
    read = {name: tensor for name, tensor in tensors.items() if name not in others}
    assert result.mapped_bytes == mapped_bytes(read, CODED) and job.launches


def in_bf16_without_memory(patch: pytest.MonkeyPatch, rank: int, folder: Path) -> None:
    """One rank has no room for codes: none makes any from then on."""
    job, warnings = Job(patch, rank, Elsewhere), list[str]()

    if rank == 1:
        full = Mock(side_effect=CudaMemoryError("out of memory"))
        patch.setattr(shard_codes, "DeviceMemory", full)
    patch.setattr(shard_codes.logger, "warning", lambda text, *args: warnings.append(text % args))
    assert job.read(5) == [0, *[PLAIN] * 4]
    assert len(warnings) == (rank == 0), warnings
    assert job.launches <= 2, "only where it was not known yet"


def made_by(job: Job) -> int:
    """How many allocations were made, once of three updates the third one reads codes."""
    made = [job.step() and len(job.memories.made) for _ in range(3)]
    assert made[2] == made[1] + 1
    return made[1]


def as_long_as_engines_have_them(patch: pytest.MonkeyPatch, rank: int, folder: Path) -> None:
    """Codes are freed once no engine has them open: here one that the trainer no longer names.
    ``Job.check`` sees that none is freed before."""
    job = Job(patch, rank, GpuEngine, GpuEngine)
    made = made_by(job)
    gone, job.engines = job.engines[:1], job.engines[1:]
    for _ in range(3):  # the first of these still reads codes, the others BF16
        assert job.step().mapped_bytes
        assert len(job.memories.made) == made + 1
    for engine in gone:
        with looping(engine):
            close(engine)
    job.step()
    assert len(job.memories.made) == made


def while_one_is_left_out(patch: pytest.MonkeyPatch, rank: int, folder: Path) -> None:
    """An engine that missed an update still has codes open."""
    job = Job(patch, rank, Elsewhere, Elsewhere)
    job.read(3)
    codes, engines = KEPT.codes._codes, job.engines
    for engine in engines[1:]:
        engine.dead = ("begin",)
    job.engines = engines[:1]  # which are compared
    if rank == 1:
        job.trainer.move()
    tensors = toy.checkpoint(3)
    result = update(job.trainer.become(tensors), engines or None, version=3, require=1)
    assert len(job.check(result, tensors).failed) == 1
    assert codes in KEPT.codes._retired
    for engine in engines[1:]:
        engine.dead = ()
    job.engines = engines
    job.step_to(4)
    assert codes not in KEPT.codes._retired


def until_the_last_engine_is_closed(patch: pytest.MonkeyPatch, rank: int, folder: Path) -> None:
    job = Job(patch, rank, Elsewhere)
    made = made_by(job)
    for engine in job.engines:
        with looping(engine):
            close(engine)
    ranks.meet(rank, folder, "left", WORLD)
    if rank == 1:
        assert len(job.memories.made) == made + 1
        close(None)
    assert len(job.memories.made) == made and not job.memories.torn
    assert job.read(1) == [AS_CODES]


def where_shards_move_at_each_update(patch: pytest.MonkeyPatch, rank: int, folder: Path) -> None:
    """Nothing is prepared that is not used."""
    job = Job(patch, rank, Elsewhere)
    patch.setattr(placed_shards, "Shards", None)
    patch.setattr(shard_codes, "codes_wanted", None)
    for _ in range(3):
        job.trainer.move()
        assert job.read(1) == [0]
    assert not job.launches


def without_a_decision(patch: pytest.MonkeyPatch, rank: int, folder: Path) -> None:
    """It only makes updates faster: they do not fail with it."""
    job = Job(patch, rank, Elsewhere)
    patch.setattr(shard_codes, "codes_wanted", lambda *_: 1 / 0)
    assert job.read(3) == [0, PLAIN, PLAIN]
    assert not job.launches


@pytest.mark.guarantee("all-or-none", fault="codes that trainer ranks make, NaN in one of them")
@pytest.mark.timeout(300)
def test_codes_of_two_ranks(tmp_path: Path) -> None:
    cases = (
        as_long_as_engines_have_them,
        while_one_is_left_out,
        until_the_last_engine_is_closed,
        where_shards_move_at_each_update,
        without_a_decision,
        behind_a_gpu,
        of_faults,
        of_other_layouts,
        beside_what_is_gathered,
        in_bf16_without_memory,  # the last one: a process does not try again
    )
    run(cases, tmp_path, join_s=270.0)
