"""Channel FP8 and INT8 on the GPU: one grouped kernel that quantizes whole rows.

As ``weight_quant_triton`` does for blocks: a chunk of an update is a few launches, however many
tensors it holds, and the bytes are those of ``channel.py``. A rank that keeps a part of each row
reads the whole of it for the scale.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from sgl_fp8rl.ops.channel import LARGEST
from sgl_fp8rl.ops.copy_descriptors import ACCESS, CopyDescriptor
from sgl_fp8rl.ops.weight_quant_triton import (
    DTYPES,
    FLOOR,
    INF,
    TOP_SCALE,
    Launch,
    bits_of,
    cast,
    launch_of,
    quotient,
)

_ROWS = tl.constexpr(4)
"""Of a program."""
_COLS = tl.constexpr(1024)
"""Of a row that a program reads at once."""
_CODES = {torch.float8_e4m3fn: tl.float8e4nv, torch.int8: tl.int8}
_FIELDS = tl.constexpr(13)
# 1.5 * 2**23: a sum with it has the nearest integer, ties to even, in its low bits
_MAGIC = tl.constexpr(12582912.0)
_MAGIC_BITS = tl.constexpr(0x4B400000)


def compile_rows(
    descriptors: Iterable[CopyDescriptor], device: torch.device | str, dtype: torch.dtype
) -> list[Launch]:
    """Copies with ``kept`` columns as device tables, one launch for each kind of them.

    Args:
        dtype: the model's, to which weights are rounded before they are quantized.
    """
    kinds: dict[Any, list[CopyDescriptor]] = defaultdict(list)
    for each in descriptors:
        kinds[each.source_dtype, each.target_dtype, _is_aligned(each)].append(each)
    launches = []
    for (source, target, aligned), same in kinds.items():
        programs = np.array([-(-each.rows // _ROWS.value) for each in same])
        first = (np.cumsum(programs) - programs).tolist()
        table = [
            (start, *each[:9], each.tag, *(each.kept or ()))
            for start, each in zip(first, same, strict=True)
        ]
        dtypes = DTYPES[source], _CODES[target], DTYPES[dtype]
        kind = *dtypes, aligned, LARGEST[target]
        launches.append(launch_of(_quantize_rows, np.array(table), programs, kind, device))
    return launches


def _is_aligned(rows: CopyDescriptor) -> bool:
    """Elements of the source have at least two bytes, so 16 of them are more than enough."""
    sides = (rows.source, rows.source_stride, rows.cols, rows.target, rows.target_stride)
    return not any(side % ACCESS for side in (*sides, *(rows.kept or ())))


# The base is an i64 whatever its value, so that 0 and a multiple of 16 compile nothing anew.
@triton.jit(do_not_specialize=["base"])
def _quantize_rows(
    program_descriptor: tl.tensor,
    table: tl.tensor,
    bases: tl.tensor,
    base: tl.int64,
    status: tl.tensor,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    MODEL: tl.constexpr,
    ALIGNED: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """One program quantizes ``_ROWS`` rows. ``bases`` is read where ``base`` is 0."""
    program = tl.program_id(0)
    descriptor = table + tl.load(program_descriptor + program).to(tl.int64) * _FIELDS
    source = tl.load(bases + tl.load(descriptor + 1), mask=base == 0, other=base)
    source = (source + tl.load(descriptor + 2)).to(tl.pointer_type(SOURCE))
    target = tl.load(descriptor + 3).to(tl.pointer_type(TARGET))
    scales = tl.load(descriptor + 4).to(tl.pointer_type(tl.float32))
    rows = tl.load(descriptor + 5)
    cols = tl.load(descriptor + 6)
    first = tl.load(descriptor + 11)
    last = tl.load(descriptor + 12)
    source_stride = tl.load(descriptor + 7)
    target_stride = tl.load(descriptor + 8)
    if ALIGNED:
        source = tl.multiple_of(source, 16)
        target = tl.multiple_of(target, 16)
        source_stride = tl.multiple_of(source_stride, 16)
        target_stride = tl.multiple_of(target_stride, 16)
        cols = tl.multiple_of(cols, 16)
        first = tl.multiple_of(first, 16)
        last = tl.multiple_of(last, 16)
    row = (program - tl.load(descriptor)) * _ROWS + tl.arange(0, _ROWS).to(tl.int64)
    is_row = row < rows
    col = tl.arange(0, _COLS)[None, :]
    source += row[:, None] * source_stride
    target += row[:, None] * target_stride
    bits = tl.zeros((_ROWS, _COLS), tl.int32)
    for start in range(0, cols, _COLS):
        inside = is_row[:, None] & (start + col < cols)
        x = cast(tl.load(source + start + col, mask=inside, other=0.0), MODEL)
        bits = tl.maximum(bits, bits_of(x))
    top = tl.max(bits, axis=1)
    scale = tl.div_rn(tl.maximum(top.to(tl.float32, bitcast=True), FLOOR), LARGEST)
    tl.store(scales + row * tl.load(descriptor + 9), scale, mask=is_row)
    for start in range(first, last, _COLS):
        inside = is_row[:, None] & (start + col < last)
        x = cast(tl.load(source + start + col, mask=inside, other=0.0), MODEL)
        exact = quotient(x, scale[:, None])
        if tl.int8 == TARGET:
            codes = ((exact + _MAGIC).to(tl.int32, bitcast=True) - _MAGIC_BITS).to(tl.int8)
        else:
            codes = exact.to(tl.float8e4nv)  # as weight_quant_triton, without a clamp
        tl.store(target + start + col, codes, mask=inside)
    # by bits first: the largest of NaN and a number is the number on a GPU, so no scale is NaN
    if (tl.max(top, axis=0) >= INF) | (tl.max(scale, axis=0) > TOP_SCALE):
        tl.atomic_min(status, tl.load(descriptor + 10), sem="relaxed")
    tl.atomic_add(status + 1, 1, sem="relaxed")
