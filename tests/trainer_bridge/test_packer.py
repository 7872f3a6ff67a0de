"""Filling a bucket with a kernel: codes and scales land where the manifest has them.

The kernel itself runs in ``tests/gpu``; here a second implementation takes its place,
which is given every box that the kernel would be.
"""

import ctypes
import sys
from collections.abc import Iterable
from typing import Any, cast

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, reject
from numpy.typing import NDArray

from sgl_fp8rl.formats import BLOCK_FP8
from sgl_fp8rl.formats.block_fp8 import SCALES as SCALE_SUFFIX
from sgl_fp8rl.ops import weight_quant_triton
from sgl_fp8rl.ops.copy_descriptors import ACCESS, CopyDescriptor
from sgl_fp8rl.ops.reference import quantize_weight
from sgl_fp8rl.ops.weight_quant_triton import Bases
from sgl_fp8rl.protocol.manifest import ManifestError
from tests.sgl_fp8rl.receiver.fake_gpu import FakeLaunch, Interpreter
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.sources.parameters import Named, sources
from trainer_bridge.transfer.packer import QuantizePacker
from trainer_bridge.transfer.transfer_plan import TransferPlan, is_aligned

BF16 = torch.bfloat16


def at(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """The memory at an address."""
    memory = (ctypes.c_uint8 * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


class Anywhere(Interpreter):
    """May touch all memory."""

    readable = writable = [(0, 1 << 64)]  # type: ignore[assignment]  # noqa: RUF012

    def __init__(self) -> None:
        self.lost_tiles, self.stages, self.joined = 0, [], []


def by_reference(weight: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Some ten times as fast as the oracle."""
    codes, scale = quantize_weight(torch.from_numpy(weight))
    return codes.view(torch.uint8).numpy(), scale.numpy()


class Launch(FakeLaunch):
    """What the kernel of updates does with its boxes."""

    quantize, runs = staticmethod(by_reference), 0

    def run(self, bases: Bases, status: Any) -> None:
        several = [bases] if isinstance(bases, int) else bases.tolist()
        assert isinstance(bases, int) or len(several) > 1, "a table of one is a needless copy"
        assert not any(base % ACCESS for base in several), "the kernel reads whole accesses"
        self.runs += 1
        super().run(bases, status)


def compile_boxes(
    descriptors: Iterable[CopyDescriptor], device: torch.device, dtype: torch.dtype
) -> list[Launch]:
    return [Launch(Anywhere(), list(descriptors), dtype)]


def without_triton(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(weight_quant_triton, "compile_descriptors", compile_boxes)


@pytest.fixture(autouse=True, scope="module")
def in_torch() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        without_triton(patch)
        yield


def packer_of(plan: TransferPlan) -> tuple[QuantizePacker, torch.Tensor]:
    """What fills a bucket, and the bucket."""
    bucket = torch.full((plan.manifest.bucket_bytes,), 0xA5, dtype=torch.uint8)
    packer = QuantizePacker(plan, bucket, BF16)
    packer.begin()
    return packer, bucket


def replay(plan: TransferPlan, named: Named) -> dict[str, torch.Tensor]:
    """What the engine reads of each HF tensor, scales included, chunk by chunk."""
    specs = plan.manifest.tensors
    packer, bucket = packer_of(plan)
    found = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
    turns = list(plan.turns)
    for number, chunk in enumerate(plan.chunks):
        while turns and turns[0][0] == number:
            source = turns.pop(0)[1]
            whole = plan.sources[source].read(named[source][1])
            packer.put(source, whole if is_aligned(whole) else whole.clone(), number)
        packer.complete(number)
        for chunk_slice in chunk:
            target = found[chunk_slice.name]
            if target.dim():
                target = target[slice(*chunk_slice.rows)]
            stop = chunk_slice.offset + target.numel() * target.itemsize
            target.copy_(bucket[chunk_slice.offset : stop].view(target.dtype).view(target.shape))
    packer.finish()
    return found


SHAPES = st.one_of(
    st.tuples(st.integers(1, 300)),
    st.tuples(st.integers(1, 400), st.integers(1, 300)),
    st.tuples(st.integers(1, 4), st.integers(1, 140), st.integers(1, 140)),
)


@st.composite
def trainers(draw: st.DrawFn) -> tuple[Named, str, set[str], set[int]]:
    """Parameters, their family, the HF tensors that the engine keeps in FP8, and the parameters
    that are resident."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    family = draw(st.sampled_from(["qwen3_moe", "gpt_oss"]))
    named: Named = []
    for number in range(draw(st.integers(1, 4))):
        shape = draw(SHAPES)
        if len(shape) == 3 and draw(st.booleans()):
            shape, name = (shape[0], 2 * shape[1], shape[2]), f"l{number}.mlp.experts.gate_up_proj"
        else:
            name = f"p{number}"
        dtype = draw(st.sampled_from([BF16, torch.float16, torch.float32]))
        named.append((name, torch.randn(shape, generator=generator).to(dtype)))
    matrices = sorted(
        name
        for source in sources(named, family, BF16)
        for name, view in source.announce(BF16)
        if view.dim() > 1
    )
    kept = draw(st.sets(st.sampled_from(matrices))) if matrices else set()
    return named, family, kept, draw(st.sets(st.integers(0, len(named) - 1)))


@given(trainers(), st.integers(1, 1000), st.integers(1, 2))
def test_codes_and_scales_are_those_of_the_reference(
    trainer: tuple[Named, str, set[str], set[int]], units: int, slots: int
) -> None:
    named, family, quantized, resident = trainer
    made = sources(named, family, BF16)
    try:
        encoded = dict.fromkeys(quantized, BLOCK_FP8)
        unmapped = [False] * len(named)
        plan = TransferPlan(made, unmapped, 256 * units, encoded, resident, slots=slots)
    except ManifestError:
        reject()
    found = replay(plan, named)
    for source, (_, tensor) in zip(made, named, strict=True):
        for name, cut in source.cuts:
            weight = cut(tensor).to(source.sent_as)
            if name in quantized:
                check_codes(found, name, weight)
            else:
                assert torch.equal(found.pop(name), weight)
    assert not found


def check_codes(found: dict[str, torch.Tensor], name: str, weight: torch.Tensor) -> None:
    codes, scale = quantize_weight(weight)
    assert torch.equal(found.pop(name).view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found.pop(name + SCALE_SUFFIX), scale)


def plan_of(
    named: Named, quantized: set[str], chunk_bytes: int = 1 << 16, resident: tuple[int, ...] = ()
) -> TransferPlan:
    unmapped = [False] * len(named)
    encoded = dict.fromkeys(quantized, BLOCK_FP8)
    return TransferPlan(sources(named, None, BF16), unmapped, chunk_bytes, encoded, resident)


def test_codes_that_the_trainer_made_go_as_they_are() -> None:
    weight = torch.randn(300, 200)
    codes, scale = quantize_weight(weight)
    named = [("w", codes), ("w" + SCALE_SUFFIX, scale)]
    plan = plan_of(named, {"w"})
    assert [span.scales for spans in plan.spans for span in spans] == [-1] * len(plan.turns)
    assert plan.manifest.nbytes == 300 * 200 + 3 * 2 * 4
    check_codes(replay(plan, named), "w", weight)


@pytest.mark.parametrize("start", range(9))
def test_a_parameter_may_begin_anywhere(start: int) -> None:
    """As a view into a flat buffer does; the kernel is given what is aligned."""
    flat = torch.randn(start + 200 * 130, generator=torch.Generator().manual_seed(0)).to(BF16)
    weight = flat[start:].view(200, 130)
    named = [("w", weight), ("v", weight[3, 1:6])]
    found = replay(plan_of(named, {"w"}), named)
    check_codes(found, "w", weight)
    assert torch.equal(found["v"], named[1][1])


def test_what_is_resident_takes_one_launch_a_part() -> None:
    """And what is gathered one of its own, before the next is gathered."""
    named = [(f"w{number}", torch.randn(128, 128).to(BF16)) for number in range(6)]
    plan = plan_of(named, {name for name, _ in named}, 1 << 16, resident=(0, 1, 2, 5))
    assert len(plan.chunks) > 1
    packer, _ = packer_of(plan)
    for number in range(len(plan.chunks)):
        mine = [source for chunk, source in plan.turns if chunk == number]
        for source in mine:
            started = cast(Any, packer)._status.started
            packer.put(source, named[source][1], number)
            assert (cast(Any, packer)._status.started > started) == (source not in plan.resident)
        packer.complete(number)
        launches = cast(Any, packer)._together.get(number, [])
        assert [launch.runs for launch in launches] == [1] * any(s in plan.resident for s in mine)
    packer.finish()


def test_what_was_put_before_a_failure_is_forgotten() -> None:
    named = [("v", torch.ones(128, 128, dtype=BF16)), ("w", torch.ones(128, 128, dtype=BF16))]
    plan = plan_of(named, {"v", "w"}, 1 << 16, resident=(0, 1))
    packer, _ = packer_of(plan)
    packer.put(0, torch.full((128, 128), float("nan"), dtype=BF16), 0)
    packer.begin()
    for chunk, source in plan.turns:
        packer.put(source, named[source][1], chunk)
    packer.complete(0)
    packer.finish()


def test_a_trainer_without_triton_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of([("w", torch.ones(128, 128, dtype=BF16))], {"w"})
    monkeypatch.setitem(sys.modules, weight_quant_triton.__name__, None)
    with pytest.raises(EngineError, match=r"cannot quantize without Triton .*pip install triton"):
        packer_of(plan)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_is_found_before_commit_and_forgotten_after(bad: float) -> None:
    named = [("v", torch.ones(5)), ("w", torch.ones(256, 128, dtype=BF16))]
    plan = plan_of(named, {"w"})
    packer, _ = packer_of(plan)
    named[1][1][200, 3] = bad
    for healthy in (False, True):
        if healthy:
            named[1][1][200, 3] = 1.0
        packer.begin()
        for chunk, source in plan.turns:
            packer.put(source, named[source][1], chunk)
            packer.complete(chunk)
        if healthy:
            packer.finish()
        else:
            with pytest.raises(EngineError, match="w holds NaN or Inf"):
                packer.finish()


def test_boxes_that_were_not_written_are_missed() -> None:
    """As when a kernel ends early."""
    named = [("w", torch.ones(512, 128, dtype=BF16))]
    plan = plan_of(named, {"w"})
    packer, _ = packer_of(plan)
    chunk, source = plan.turns[0]
    packer.put(source, named[source][1], chunk)
    cast(Any, packer)._status.words[1] -= 1
    with pytest.raises(RuntimeError, match="blocks were written"):
        packer.finish()
