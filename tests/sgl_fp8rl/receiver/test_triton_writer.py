"""The writer of a GPU on the CPU; ``fake_gpu.py`` stands for its kernels."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_fp8rl.formats import BLOCK_FP8
from sgl_fp8rl.formats.block_fp8 import SCALES
from sgl_fp8rl.formats.copies import Placed, Scales, describe_copy
from sgl_fp8rl.ops.copy_descriptors import CopyDescriptor
from sgl_fp8rl.ops.regions import Region, strides_of, view, whole
from sgl_fp8rl.ops.weight_quant_triton import Status
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver.writers import cut_blocks, triton_writer
from sgl_fp8rl.receiver.writers.shared_memory import SharedMemoryError
from tests import oracle
from tests.sgl_fp8rl.receiver import fake_gpu, toy
from tests.sgl_fp8rl.receiver.fake_gpu import (
    GPUS,
    SECONDS,
    FakeLaunch,
    Interpreter,
    OnDevice,
    engine,
    in_place,
    span_of,
)
from tests.sgl_fp8rl.receiver.toy import BF16, FP8

gpu = fake_gpu.gpu
CPU = torch.device("cpu")
BLOCK_ROWS = 128 * toy.HEADS
"""Elements of 128 rows of the widest matrix of the toy model."""


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], Region, list[int], Region]:
    """Two tensors' shapes and a box in each, of equal sizes but for dimensions of length 1."""

    def in_tensor(lengths: list[int]) -> tuple[list[int], Region]:
        for _ in range(draw(st.integers(0, 2))):
            lengths.insert(draw(st.integers(0, len(lengths))), 1)
        starts = [draw(st.integers(0, 2)) for _ in lengths]
        region = tuple((start, start + n) for start, n in zip(starts, lengths, strict=True))
        return [stop + draw(st.integers(0, 2)) for _, stop in region], region

    lengths = draw(st.lists(st.integers(1, 5), max_size=4))
    return *in_tensor(list(lengths)), *in_tensor([n for n in lengths if n != 1])


@given(boxes(), st.sampled_from([torch.float16, torch.float32]))
def test_a_box_of_any_form_is_copied(
    drawn: tuple[list[int], Region, list[int], Region], dtype: torch.dtype
) -> None:
    src_shape, src, dst_shape, dst = drawn
    source = torch.arange(torch.Size(src_shape).numel()).to(dtype).view(src_shape)
    target = torch.full(dst_shape, -1.0, dtype=dtype)
    expected = target.clone()
    view(expected, dst).copy_(view(source, src).reshape(view(expected, dst).shape))
    placed = Placed(0, dtype, strides_of(tuple(src_shape))), placed_at(target)
    descriptors = list(describe_copy(placed[0], src, placed[1], dst))
    assert carry_out(descriptors, source, [target], dtype) == (None, True)
    assert torch.equal(target, expected)


def placed_at(tensor: torch.Tensor) -> Placed:
    return Placed(tensor.data_ptr(), tensor.dtype, tensor.stride())


def carry_out(
    descriptors: list[CopyDescriptor],
    source: torch.Tensor,
    targets: list[torch.Tensor],
    dtype: torch.dtype,
) -> tuple[int | None, bool]:
    """The least tag of a bad value, and whether all tiles are done."""
    interpreter, status = Interpreter(), Status(CPU)
    interpreter.shared = [span_of(source)]
    interpreter.writable = [span_of(target) for target in targets]
    launch = FakeLaunch(interpreter, descriptors, dtype)
    launch.run(source.data_ptr(), status)
    bad, tiles = status.read()
    return bad, tiles == launch.tiles


def blocks(draw: st.DrawFn, length: int) -> tuple[int, int]:
    """A span of whole 128-blocks, but for the ragged end."""
    count = -(-length // 128)
    first = draw(st.integers(0, count - 1))
    last = draw(st.integers(first + 1, count))
    return first * 128, min(last * 128, length)


@settings(max_examples=15)
@given(st.data())
def test_a_box_of_whole_blocks_is_quantized(data: Any) -> None:
    draw = data.draw
    experts_, rows, cols = draw(st.integers(1, 3)), *(draw(st.integers(1, 300)) for _ in "nk")
    source = torch.randn(experts_, rows, cols, generator=torch.Generator().manual_seed(0)).to(BF16)
    first = draw(st.integers(0, experts_ - 1))
    spans = (first, draw(st.integers(first + 1, experts_))), blocks(draw, rows), blocks(draw, cols)
    src: Region = spans
    n, height, width = (stop - start for start, stop in src)
    down, right = (128 * draw(st.integers(0, 1)) for _ in "nk")
    dst: Region = ((1, 1 + n), (down, down + height), (right, right + width))
    codes = torch.full((n + 2, down + height, right + width), 0x77, dtype=torch.uint8)
    scales = torch.full((n + 2, -(-codes.shape[1] // 128), -(-codes.shape[2] // 128)), -5.0)
    expected, expected_scales = codes.numpy().copy(), scales.numpy().copy()
    found, found_scales = oracle.quantize_weight(view(source, src).float().numpy())
    expected[1 : 1 + n, down:, right:] = found.view(np.uint8)
    expected_scales[1 : 1 + n, down // 128 :, right // 128 :] = found_scales

    target = Placed(codes.data_ptr(), FP8, codes.stride())
    scale_box = Scales(placed_at(scales), BLOCK_FP8.companion_region(SCALES, dst))
    descriptors = list(describe_copy(Placed(0, BF16, source.stride()), src, target, dst, scale_box))
    assert len(descriptors) == n
    assert carry_out(descriptors, source, [codes, scales], BF16) == (None, True)
    assert np.array_equal(codes.numpy(), expected)
    assert np.array_equal(scales.numpy(), expected_scales)


def test_a_table_is_small_where_memory_is_contiguous() -> None:
    """A whole tensor into a whole parameter is one copy, whatever its dimensions."""
    source, target = torch.zeros(3, 5, 7, 8), torch.zeros(3, 5, 7, 8)
    box = whole(tuple(source.shape))
    placed = Placed(0, torch.float32, source.stride())
    (only,) = describe_copy(placed, box, placed_at(target), box)
    assert only.rows * only.cols == source.numel()


# -- where a chunk lies


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_bucket_on_the_host_is_staged_in_one_slot(
    gpu: Interpreter, on_device: bool, slots: int
) -> None:
    weights = engine(gpu, toy.toy(), toy.SHAPES)
    sizes = [] if on_device else [2 * BLOCK_ROWS]
    for version in range(2):
        tensors = toy.checkpoint(version)
        session = toy.begin(weights, tensors, version, 2 * BLOCK_ROWS, slots=slots)
        bucket = weights.memory.bucket
        assert bucket is not None
        if on_device:
            gpu.shared.append(span_of(bucket.content))
            bucket.content = bucket.content.as_subclass(OnDevice)
        toy.write(session, tensors)
        count = len(session.writer.chunks)
        assert count > 4
        assert session.finish() == pytest.approx(SECONDS * count), "those of this update"
        weights.commit()
        assert [stage.tensor.numel() for stage in gpu.stages] == sizes * (version + 1)
        assert all(stage.closed == 1 for stage in gpu.stages)
        assert toy.same(toy.contents(weights.model), toy.expected(tensors))


def test_a_stage_is_freed_where_a_launch_fails(gpu: Interpreter) -> None:
    tensors = toy.checkpoint()
    weights = engine(gpu, toy.toy(), toy.SHAPES)
    session = toy.begin(weights, tensors)
    gpu.writable.clear()
    with pytest.raises(AssertionError, match="not this move's to touch"):
        session.write(0)
    weights.quarantine("a launch failed")
    assert [stage.closed for stage in gpu.stages] == [1]


@pytest.mark.parametrize("rows", [1 << 20, 128, 64, 200, 3])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("fp8", [False, True])
def test_what_is_mapped_is_read_where_it_lies(
    gpu: Interpreter, monkeypatch: pytest.MonkeyPatch, tp: int, fp8: bool, rows: int
) -> None:
    """Also the shards of several ranks, wherever they cut a block."""
    monkeypatch.setattr(cut_blocks, "JOINED_BYTES", 128 * 1024)  # a few blocks
    for rank in range(tp):
        weights = engine(gpu, toy.toy(rank, tp), toy.SHAPES)
        compiled = []
        gpu.joined.clear()
        for version, (gap, stays) in enumerate([(0, False), (0, True), (64, False), (64, True)]):
            tensors = toy.checkpoint(version)
            streamed = toy.quantized(tensors) if fp8 else tensors
            mapped = {n: t for n, t in streamed.items() if n.startswith(("mlp", "norm"))}
            segments = in_place(gpu, mapped, gap, rows)
            if stays:  # the same memory with other values, as after an optimizer's step
                old = weights.memory.mapped()
                for mine, other in zip(old._mappings, segments._mappings, strict=True):
                    mine.tensor.copy_(other.tensor)
                    gpu.shared.append(span_of(mine.tensor))
                segments = old
            session = toy.begin(weights, streamed, version, 1 << 18, mapped=mapped)
            weights.memory.segments = segments
            toy.write(session, streamed)
            session.finish()
            weights.commit()
            compiled.append(gpu.compiled)
            assert toy.same(toy.contents(weights.model), toy.expected(tensors, rank, tp))
        again, elsewhere, last = (b - a for a, b in pairwise(compiled))
        assert again == last == 0
        # one for all, and two for each batch of blocks that are put together first
        assert elsewhere % 2 == 1
        assert bool(gpu.joined) == (elsewhere > 1)
        if fp8 or rows % 128 == 0:
            assert elsewhere == 1
        elif tp == 1 or rows < 128:  # else this rank may keep no rows of a cut block
            assert elsewhere > 1


def test_places_are_checked_before_they_are_read(gpu: Interpreter) -> None:
    tensors = toy.checkpoint()
    weights = engine(gpu, toy.toy(), toy.SHAPES)
    before = toy.contents(weights.model)
    session = toy.begin(weights, tensors, mapped=tensors)
    assert weights.memory.bucket is None  # not needed, so the trainer may free it
    segments = weights.memory.segments = in_place(gpu, tensors, 0)
    (good,) = segments.places["norm.weight"]
    segments.places["norm.weight"] = [good._replace(offset=(1 << 20) - 2 * toy.HIDDEN + 2)]
    for _ in range(2):
        with pytest.raises(SharedMemoryError, match=r"norm\.weight does not lie in the memory"):
            session.write(0)
    assert toy.same(before, toy.contents(weights.model))
    segments.places["norm.weight"] = [good]
    session.write(0)
    session.finish()
    assert toy.same(toy.contents(weights.model), toy.expected(tensors))


@pytest.mark.parametrize("own", [0, 1])
def test_the_engines_own_gpu_is_read_first(
    gpu: Interpreter, monkeypatch: pytest.MonkeyPatch, own: int
) -> None:
    monkeypatch.setattr(triton_writer, "gpu_uuid", lambda device: GPUS[own])
    orders: list[list[int]] = []

    def seen(descriptors: list[CopyDescriptor]) -> list[CopyDescriptor]:
        orders.append([each.segment for each in descriptors])
        return descriptors

    gpu.damage = seen
    tensors = toy.checkpoint()
    weights = engine(gpu, toy.toy(), toy.SHAPES)
    session = toy.begin(weights, tensors, mapped=tensors)
    weights.memory.segments = in_place(gpu, tensors, 0, 128)
    session.write(0)
    (order,) = filter(None, orders)
    assert order[:2] == [own, 1 - own]


@pytest.mark.parametrize("rows", [64, 200])
def test_a_piece_that_cuts_a_block_is_never_quantized_by_itself(
    gpu: Interpreter, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """The control: halves of a block would have scales of their own."""
    monkeypatch.setattr(triton_writer, "at_blocks", lambda name, pieces, *_: (pieces, []))
    tensors = toy.checkpoint()
    weights = engine(gpu, toy.toy(), toy.SHAPES)
    before = toy.contents(weights.model)
    session = toy.begin(weights, tensors, mapped=tensors)
    weights.memory.segments = in_place(gpu, tensors, 0, rows)
    with pytest.raises(ValueError, match=r"a piece of attn\.q\.weight cuts a 128x128 block"):
        session.write(0)
    assert not session.dirty and toy.same(before, toy.contents(weights.model))


# -- what is found at the end


def test_blocks_that_were_not_written_are_noticed(gpu: Interpreter) -> None:
    weights = engine(gpu, toy.toy(), toy.SHAPES)
    gpu.lost_tiles = 1
    with pytest.raises(RuntimeError, match=r"\d+ of \d+ blocks were written"):
        toy.update(weights, toy.checkpoint())
    assert weights.state is not State.SERVING
