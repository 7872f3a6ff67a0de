"""Block FP8 on the GPU: one grouped kernel that carries out a table of copies.

A copy takes a box of a tensor from where the trainer left it to where the engine keeps it:
quantized to codes and scales, cast, or copied. The bytes are those of ``reference.py``. A chunk of
an update is a few launches, however many tensors it holds.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from subprocess import SubprocessError
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from sgl_fp8rl.ops.copy_descriptors import COLUMNS, CopyDescriptor, group_descriptors
from sgl_fp8rl.ops.reference import AMAX_FLOOR, BLOCK, CARRY, EXPONENT, FP8_MAX, LARGEST_SCALE

_NO_TAG = 2**63 - 1
# No fusion: the compiler must not make FMAs of its own in a division.
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
}


Bases = int | torch.Tensor
"""Where the segments of copies lie, at multiples of 16: the address of the only one, or int64
addresses on the device."""


def bases_at(addresses: list[int], device: torch.device) -> Bases:
    """What ``Launch.run`` takes. One address is an argument: a table is a copy to the device."""
    if len(addresses) == 1:
        return addresses[0]
    return torch.tensor(addresses, dtype=torch.int64).to(device)


class Status:
    """What the kernel found, on the device: the least tag of a bad value, and tiles done."""

    started: int
    """Tiles of all launches since ``reset``: how many must be done in the end."""

    def __init__(self, device: torch.device | str) -> None:
        self.words = torch.empty(2, dtype=torch.int64, device=device)
        self.reset()

    def reset(self) -> None:
        """Forget all; asynchronous."""
        self.words[0].fill_(_NO_TAG)
        self.words[1].zero_()
        self.started = 0

    def read(self) -> tuple[int | None, int]:
        """(least tag with a bad value or None, tiles done since ``reset``); synchronises."""
        tag, tiles = self.words.tolist()
        return (None if tag == _NO_TAG else tag), tiles


@contextmanager
def compiling() -> Iterator[None]:
    """Raise what Triton cannot compile as a RuntimeError with one sentence."""
    try:
        yield
    except (TritonError, SubprocessError) as error:
        raise RuntimeError(
            f"the kernel of updates cannot be compiled ({type(error).__name__}: {error}); "
            f"install a C compiler and Python's headers, which Triton needs"
        ) from error


@dataclass(frozen=True)
class Launch:
    """Copies of one kind, as device tables."""

    tiles: int
    """128x128 tiles, the ragged ones included: what ``Status`` counts for one run."""
    tile_descriptor: torch.Tensor
    """int32: the row of ``table`` of each."""
    table: torch.Tensor
    kind: tuple[Any, ...]
    """What the kernel is compiled for."""
    _compiled: list[Any] = field(default_factory=list, repr=False, compare=False)
    """The kernel, once it was started: to look it up by its arguments takes longer than to start
    it, and a stream starts one for each tensor."""

    def run(self, bases: Bases, status: Status) -> None:
        """Start the kernel on the current stream. Where a value is bad, what is written is too.

        Raises:
            RuntimeError: the kernel cannot be compiled here.
        """
        status.started += self.tiles
        base, several = (bases, self.table) if isinstance(bases, int) else (0, bases)
        arguments = self.tile_descriptor, self.table, several, base, status.words, *self.kind
        # a kernel starts on the current device
        with compiling(), torch.cuda.device_of(status.words):
            if self._compiled:
                self._compiled[0][self.tiles, 1, 1](*arguments)
            else:
                kernel = _copy_tiles[(self.tiles,)](*arguments, **_OPTIONS)
                if kernel is not None:  # Triton's interpreter compiles nothing
                    self._compiled.append(kernel)


def compile_descriptors(
    descriptors: Iterable[CopyDescriptor], device: torch.device | str, dtype: torch.dtype
) -> list[Launch]:
    """Copies as device tables, one launch for each kind of them.

    Args:
        dtype: the model's, to which weights are rounded before they are quantized.
    """
    launches = []
    for group in group_descriptors(descriptors):
        dtypes = (DTYPES[each] for each in (group.source_dtype, group.target_dtype, dtype))
        kind = *dtypes, group.positive, group.power_of_two, group.full
        table = torch.from_numpy(group.table.view(np.int64)).to(device)
        total, count = int(group.tiles.sum()), len(group.tiles)
        tile_descriptor = torch.arange(count, dtype=torch.int32, device=device).repeat_interleave(
            torch.from_numpy(group.tiles).to(device), output_size=total
        )
        launches.append(Launch(total, tile_descriptor, table, kind))
    return launches


_SIDE = tl.constexpr(BLOCK)
_STRIPS = tl.constexpr(8)
_LARGEST = tl.constexpr(FP8_MAX)
FLOOR = tl.constexpr(AMAX_FLOOR)
_FIELDS = tl.constexpr(COLUMNS.itemsize // 8)
# FP32 and BF16 bits as integers: magnitudes are in order, and Inf and NaN are the largest.
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INF = tl.constexpr(EXPONENT)
_CARRY = tl.constexpr(CARRY)
TOP_SCALE = tl.constexpr(LARGEST_SCALE)
_TOP_BITS = tl.constexpr(int(np.float32(FP8_MAX * LARGEST_SCALE).view(np.int32)))


@triton.jit
def power_of_two_scale(amax: tl.tensor) -> tl.tensor:
    """``reference.scale_of`` with powers of two; amax FP32, ``FLOOR`` at least."""
    bits = (amax * 0.00390625).to(tl.int32, bitcast=True)
    return ((bits + _CARRY) & INF).to(tl.float32, bitcast=True)


@triton.jit
def _scale_of(top: tl.tensor, POWER_OF_TWO: tl.constexpr) -> tl.tensor:
    """The scale of a block whose largest magnitude has the FP32 bits ``top``."""
    amax = tl.maximum(top.to(tl.float32, bitcast=True), FLOOR)
    return power_of_two_scale(amax) if POWER_OF_TWO else tl.div_rn(amax, _LARGEST)


@triton.jit
def divide(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """``x / scale`` rounded to nearest; x holds BF16 or FP16 values, one scale for them all.

    A product with the reciprocal and Markstein's correction: three operations in the place of a
    division's ten. `tests/gpu` compares it with the division for all pairs of mantissas. Where
    the remainder underflows the code is 0, and it is taken with the sign that keeps -0.
    """
    reciprocal = tl.div_rn(1.0, scale)
    quotient = x * reciprocal
    excess = tl.fma(quotient, scale, x * -1.0)
    return tl.fma(excess, -reciprocal, quotient)


@triton.jit
def cast(x: tl.tensor, VALUE: tl.constexpr) -> tl.tensor:
    """Rounded to nearest even; what has the dtype already keeps its bytes."""
    return x if x.dtype == VALUE else x.to(tl.float32).to(VALUE)


@triton.jit
def bits_of(
    x: tl.tensor, POSITIVE: tl.constexpr = False, POWER_OF_TWO: tl.constexpr = False
) -> tl.tensor:
    """The FP32 bits of the magnitudes, as integers in their order, Inf and NaN on top; Inf for what
    must be a scale and is none."""
    values = x.to(tl.float32)
    bits = values.to(tl.int32, bitcast=True) & _MAGNITUDE
    if POSITIVE:
        good = (values > 0) & (values <= TOP_SCALE)
        if POWER_OF_TWO:
            good &= (bits & 0x7FFFFF) == 0
        bits = tl.where(good, bits, INF)
    return bits


@triton.jit
def quotient(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """``x / scale`` rounded to nearest; x is of the model's dtype.

    As a code it needs no clamp: amax / scale is at most an ulp above 448, and all up to 464 becomes
    448.
    """
    if x.dtype == tl.float32:
        return tl.div_rn(x, scale)
    return divide(x.to(tl.float32), scale)


@triton.jit
def _quantize_bf16(
    source: tl.tensor,
    target: tl.tensor,
    source_stride: tl.tensor,
    target_stride: tl.tensor,
    POWER_OF_TWO: tl.constexpr,
) -> tl.tensor:
    """Quantize a whole, aligned BF16 tile; returns the FP32 bits of its largest magnitude.

    All is loaded before anything is used. It waits as words of two BF16, which are unpacked strip
    by strip: with 64 registers a thread, four tiles are in flight on a multiprocessor.
    """
    ROWS: tl.constexpr = _SIDE // _STRIPS
    row = tl.arange(0, ROWS)[:, None].to(tl.int64)
    col = tl.arange(0, _SIDE)[None, :]
    word = tl.arange(0, _SIDE // 2)[None, :]
    source = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
    source_stride = tl.multiple_of(source_stride // 2, 4)
    strips: tl.tuple = ()
    for k in tl.static_range(_STRIPS):
        strip = tl.load(source + k * ROWS * source_stride + (row * source_stride + word))
        strips = strips + (strip,)  # noqa: RUF005
    low = strips[0] & 0x7FFF
    high = strips[0] & _MAGNITUDE
    for k in tl.static_range(1, _STRIPS):
        low = tl.maximum(low, strips[k] & 0x7FFF)
        high = tl.maximum(high, strips[k] & _MAGNITUDE)
    top = tl.max(tl.maximum(low << 16, high & 0x7FFF0000))
    scale = _scale_of(top, POWER_OF_TWO)
    for k in tl.static_range(_STRIPS):
        pairs = tl.join(strips[k] << 16, strips[k] & -0x10000).to(tl.float32, bitcast=True)
        codes = tl.reshape(divide(pairs, scale).to(tl.float8e4nv), (ROWS, _SIDE))
        tl.store(target + k * ROWS * target_stride + (row * target_stride + col), codes)
    return top


@triton.jit
def _copy_ragged(
    source: tl.tensor,
    target: tl.tensor,
    source_stride: tl.tensor,
    target_stride: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    VALUE: tl.constexpr,
    POSITIVE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
) -> tl.tensor:
    """Move a tile of ``rows`` x ``cols`` anywhere in memory, strip by strip; returns the FP32 bits
    of its largest magnitude."""
    ROWS: tl.constexpr = _SIDE // _STRIPS
    QUANTIZE: tl.constexpr = target.dtype.element_ty.is_fp8() and not VALUE.is_fp8()
    strip = tl.arange(0, ROWS)[:, None].to(tl.int64)
    col = tl.arange(0, _SIDE)[None, :]
    bits = tl.zeros((ROWS, _SIDE), tl.int32)
    for start in range(0, rows, ROWS):
        row = start + strip
        inside = (row < rows) & (col < cols)
        x = tl.load(source + row * source_stride + col, mask=inside, other=1.0 * POSITIVE)
        x = cast(x, VALUE)
        bits = tl.maximum(bits, bits_of(x, POSITIVE, POWER_OF_TWO))
        if not QUANTIZE:
            tl.store(target + row * target_stride + col, x, mask=inside)
    top = tl.max(bits)
    if QUANTIZE:
        scale = _scale_of(top, POWER_OF_TWO)
        for start in range(0, rows, ROWS):
            row = start + strip
            inside = (row < rows) & (col < cols)
            x = cast(tl.load(source + row * source_stride + col, mask=inside, other=0.0), VALUE)
            codes = quotient(x, scale).to(tl.float8e4nv)
            tl.store(target + row * target_stride + col, codes, mask=inside)
    return top


# An i64 whatever its value, so that 0 and a multiple of 16 compile nothing anew.
@triton.jit(do_not_specialize=["base"])
def _copy_tiles(
    tile_descriptor: tl.tensor,
    table: tl.tensor,
    bases: tl.tensor,
    base: tl.int64,
    status: tl.tensor,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    MODEL: tl.constexpr,
    POSITIVE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    FULL: tl.constexpr,
) -> None:
    """One program moves one 128x128 tile. ``bases`` is read where ``base`` is 0."""
    SOURCE_SIZE: tl.constexpr = SOURCE.primitive_bitwidth // 8
    TARGET_SIZE: tl.constexpr = TARGET.primitive_bitwidth // 8
    QUANTIZE: tl.constexpr = TARGET.is_fp8() and not SOURCE.is_fp8()
    VALUE: tl.constexpr = MODEL if QUANTIZE else TARGET
    tile = tl.program_id(0)
    descriptor = table + tl.load(tile_descriptor + tile).to(tl.int64) * _FIELDS
    tile -= tl.load(descriptor).to(tl.int32)
    across = tl.load(descriptor + 1).to(tl.int32)
    source = tl.load(bases + tl.load(descriptor + 2), mask=base == 0, other=base)
    source += tl.load(descriptor + 3)
    target = tl.load(descriptor + 4)
    source_stride = tl.load(descriptor + 8)
    target_stride = tl.load(descriptor + 9)
    i = (tile // across).to(tl.int64)
    j = (tile % across).to(tl.int64)
    source += (i * source_stride + j) * (_SIDE * SOURCE_SIZE)
    target += (i * target_stride + j) * (_SIDE * TARGET_SIZE)
    source = source.to(tl.pointer_type(SOURCE))
    target = target.to(tl.pointer_type(TARGET))
    if FULL:
        # Here and not in the functions below: a hint on a function's argument is lost.
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        source_stride = tl.multiple_of(source_stride, 16 // SOURCE_SIZE)
        target_stride = tl.multiple_of(target_stride, 16 // TARGET_SIZE)
        if QUANTIZE and SOURCE.is_bf16() and MODEL.is_bf16():
            top = _quantize_bf16(source, target, source_stride, target_stride, POWER_OF_TWO)
        else:
            row = tl.arange(0, _SIDE)[:, None].to(tl.int64)
            col = tl.arange(0, _SIDE)[None, :]
            x = cast(tl.load(source + row * source_stride + col), VALUE)
            top = tl.max(bits_of(x, POSITIVE, POWER_OF_TWO))
            if QUANTIZE:
                x = quotient(x, _scale_of(top, POWER_OF_TWO)).to(tl.float8e4nv)
            tl.store(target + row * target_stride + col, x)
    else:
        rows = tl.minimum(tl.load(descriptor + 6) - i * _SIDE, _SIDE).to(tl.int32)
        cols = tl.minimum(tl.load(descriptor + 7) - j * _SIDE, _SIDE).to(tl.int32)
        top = _copy_ragged(
            source, target, source_stride, target_stride, rows, cols, VALUE, POSITIVE, POWER_OF_TWO
        )
    if QUANTIZE:
        scales = tl.load(descriptor + 5) + (i * tl.load(descriptor + 10) + j) * 4
        tl.store(scales.to(tl.pointer_type(tl.float32)), _scale_of(top, POWER_OF_TWO))
    if top > (_TOP_BITS if QUANTIZE else INF - 1):
        tl.atomic_min(status, tl.load(descriptor + 11), sem="relaxed")
    tl.atomic_add(status + 1, 1, sem="relaxed")
