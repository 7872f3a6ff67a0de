"""The copies that a kernel is given, of every format: those of the engine's writer and of the
trainer's packer.

The kernel is replaced by torch on the CPU: a format brings its own, which ``tests/gpu`` holds
against the reference.
"""

import ctypes
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from sgl_fp8rl.formats import BLOCK_FP8_UE8M0, BLOCKS, UNQUANTIZED, format_of
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.ops import weight_quant_triton
from sgl_fp8rl.ops.copy_descriptors import BLOCK, CopyDescriptor, group_descriptors
from sgl_fp8rl.protocol.chunks import cut_into_chunks
from sgl_fp8rl.protocol.manifest import describe
from sgl_fp8rl.receiver.routes.routes import RouteTable
from sgl_fp8rl.receiver.writers import triton_writer
from tests.sgl_fp8rl.formats.other_format import every_format
from tests.sgl_fp8rl.formats.test_conformance import BF16, assert_same, bits, stored, weight
from trainer_bridge.sources.parameters import sources
from trainer_bridge.transfer.packer import QuantizePacker
from trainer_bridge.transfer.transfer_plan import TransferPlan

pytestmark = pytest.mark.usefixtures("other_format")


class TorchLaunch:
    """What a launch does with its copies, by the reference: it stands for a format's kernel."""

    def __init__(self, descriptors: list[CopyDescriptor], dtype: torch.dtype) -> None:
        self.descriptors, self.dtype = descriptors, dtype

    def run(self, bases: Any, status: Any) -> None:
        several = [bases] if isinstance(bases, int) else bases.tolist()
        for given in self.descriptors:
            source = boxed(
                several[given.segment] + given.source,
                (given.rows, given.cols, given.source_stride),
                given.source_dtype,
            )
            where = given.target, (given.rows, given.cols, given.target_stride), given.target_dtype
            if not given.scales:
                boxed(*where).copy_(source)
                continue
            fmt = BLOCK_FP8_UE8M0 if given.power_of_two else format_of(given.target_dtype)
            encoded = fmt.encode(source.to(self.dtype))
            boxed(*where).copy_(encoded.pop(""))
            (scales,) = encoded.values()
            strided = (*scales.shape, given.scale_stride)
            boxed(given.scales, strided, scales.dtype).copy_(scales)


def boxed(address: int, box: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    rows, cols, stride = box
    nbytes = ((rows - 1) * stride + cols) * dtype.itemsize
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    flat = torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
    return flat.as_strided((rows, cols), (stride, 1))


def compile_in_torch(
    descriptors: Iterable[CopyDescriptor], device: Any, dtype: torch.dtype
) -> list[TorchLaunch]:
    listed = list(descriptors)
    return [TorchLaunch(listed, dtype)] if listed else []


@every_format
@pytest.mark.parametrize("shape", [(384, 256), (300, 200), (3, 256, 128)])
def test_the_writer_of_a_gpu_describes_what_the_other_writer_writes(
    fmt: WeightFormat, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_writer, "compile_descriptors", compile_in_torch)
    original, table = weight(*shape), stored(fmt, shape)
    expected = fmt.encode(original)
    encoded = {f"w{s}": t for s, t in expected.items()}
    for tensors in ({"w": original}, encoded):
        for parameter in table.parameters.values():
            parameter.zero_()
        manifest = describe(tensors.items(), 1 << 17)
        writer = triton_writer.TritonWriter(table, manifest, BF16, torch.device("cpu"))
        bucket = torch.zeros(manifest.bucket_bytes, dtype=torch.uint8)
        for index, chunk in enumerate(cut_into_chunks(manifest)):
            for piece in chunk:
                rows = bits(tensors[piece.name][slice(*piece.rows)]).view(-1)
                bucket[piece.offset : piece.offset + len(rows)] = rows
            for launch in writer._launches[index]:
                launch.run(bucket.data_ptr(), None)  # type: ignore[arg-type]
        found = {name.removeprefix("w"): t for name, t in table.parameters.items()}
        assert_same(found, expected)


@every_format
@pytest.mark.parametrize("shape", [(384, 256), (300, 200), (3, 256, 128)])
def test_a_packer_lays_out_what_is_encoded(
    fmt: WeightFormat, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_quant_triton, "compile_descriptors", compile_in_torch)
    original = weight(*shape)
    quantized = {} if fmt is UNQUANTIZED else {"w": fmt}
    plan = TransferPlan(sources([("w", original)], None, BF16), [False], 1 << 17, quantized, [0])
    specs, expected = plan.manifest.tensors, fmt.encode(original)
    assert {n: s.dtype for n, s in specs.items()} == {f"w{s}": t.dtype for s, t in expected.items()}
    bucket = torch.zeros(plan.manifest.bucket_bytes, dtype=torch.uint8)
    packer = QuantizePacker(plan, bucket, BF16)
    found = {name: torch.zeros(spec.shape).to(spec.dtype) for name, spec in specs.items()}
    for number, chunk in enumerate(plan.chunks):
        packer.put(0, original, number)
        packer.complete(number)
        for piece in chunk:
            target = found[piece.name][slice(*piece.rows)]
            content = bucket[piece.offset : piece.offset + target.nbytes]
            target.copy_(content.view(target.dtype).view(target.shape))
    assert_same({name.removeprefix("w"): t for name, t in found.items()}, expected)


def launched(table: RouteTable, tensors: Any, monkeypatch: pytest.MonkeyPatch) -> TorchLaunch:
    """The only launch of an update."""
    monkeypatch.setattr(triton_writer, "compile_descriptors", compile_in_torch)
    manifest = describe(tensors.items())
    writer: Any = triton_writer.TritonWriter(table, manifest, BF16, torch.device("cpu"))
    (launch,) = writer._launches[0]
    return launch  # type: ignore[no-any-return]


@every_format
def test_what_is_quantized_keeps_its_box_and_what_is_copied_is_cut_anew(
    fmt: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel finds the scale of a tile by the tile's place in the box. What writes and what packs
    unpack one companion; a second needs its fields in ``CopyDescriptor``."""
    original, table = weight(64, 48), stored(fmt, (64, 48))
    encoded = {f"w{suffix}": t for suffix, t in fmt.encode(original).items()}
    assert len(encoded) == 1 + (fmt is not UNQUANTIZED)
    for tensors, is_quantized in (({"w": original}, fmt is not UNQUANTIZED), (encoded, False)):
        (codes, *_) = group_descriptors(launched(table, tensors, monkeypatch).descriptors)
        assert set(codes.table["cols"]) == {48 if is_quantized else BLOCK}


@pytest.mark.parametrize("fmt", BLOCKS, ids=lambda fmt: fmt.name)
def test_a_kernel_is_told_which_scales_to_make_and_to_take(
    fmt: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, table = weight(256, 128), stored(fmt, (256, 128))
    encoded = {f"w{suffix}": t for suffix, t in fmt.encode(original).items()}
    for tensors in ({"w": original}, encoded):
        given = launched(table, tensors, monkeypatch).descriptors
        assert {each.power_of_two for each in given} == {fmt.power_of_two_scales}
        assert [each.positive for each in given] == [False, True][: len(tensors)]
