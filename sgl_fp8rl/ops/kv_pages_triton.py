"""Pages of an 8-bit KV cache as 16-bit values on the GPU: one launch for K and V of a layer.

The bytes are those of ``kv_pages.py``. Nothing is allocated or synchronized.
"""

import torch
import triton
import triton.language as tl

from sgl_fp8rl.ops.kv_int8_triton import _FP16_MAX, rows_of, scales_of
from sgl_fp8rl.ops.kv_pages import check_pages
from sgl_fp8rl.ops.paged_decode import Codes


def dequantize_pages(
    codes: Codes,
    pages_P: torch.Tensor,
    size: int,
    k_WHD: torch.Tensor,
    v_WHD: torch.Tensor,
) -> None:
    """``kv_pages.dequantize_pages`` on the current stream; there is what it takes and raises."""
    check_pages(codes, pages_P, size, k_WHD, v_WHD)
    (_, H, D_K), D_V = codes.k_SHD.shape, codes.v_SHD.shape[2]
    heads = len(pages_P) * size * H
    width = triton.next_power_of_2(max(D_K, D_V))
    rows = rows_of(heads, width)
    scales = scales_of(codes)
    at_scale = (*scales[0].stride(), 0)  # E4M3 has the same scale at each slot
    if heads:
        with torch.cuda.device_of(k_WHD):  # a kernel starts on the current device
            _dequantize_rows[(triton.cdiv(heads, rows), 2)](
                (codes.k_SHD, *scales, k_WHD),
                (codes.v_SHD, *scales, v_WHD),
                (*codes.k_SHD.stride()[:2], *at_scale),
                (*codes.v_SHD.stride()[:2], *at_scale),
                pages_P,
                len(pages_P),
                SIZE=size,
                HEADS=H,
                D_K=D_K,
                D_V=D_V,
                COLS=width,
                ROWS=rows,
                num_warps=4,
            )


@triton.jit
def _dequantize_side(
    memory: tl.tuple,
    strides: tl.tuple,
    pages: tl.tensor,
    rows: tl.tensor,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    IS_V: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    codes, k_scales, v_scales, out = memory
    INT8: tl.constexpr = codes.dtype.element_ty == tl.int8
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)[None, :]
    inside = row < rows
    box = inside[:, None] & (col < D)
    token = row // HEADS
    head = row % HEADS
    page = tl.load(pages + token // SIZE, mask=inside, other=0).to(tl.int64)
    slot = page * SIZE + token % SIZE
    source = codes + (slot * strides[0] + head * strides[1])[:, None] + col
    at_scale = head * strides[2] + slot * strides[3]
    scale = tl.load((v_scales if IS_V else k_scales) + at_scale, mask=inside, other=0)
    if INT8:
        scale = (scale.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        if not IS_V:
            v_scale = tl.load(v_scales + at_scale, mask=inside, other=0).to(tl.int32) << 16
            v_scale = v_scale.to(tl.float32, bitcast=True)
            scale = tl.where(v_scale == v_scale, scale, v_scale)
    values = tl.load(source, mask=box, other=0.0).to(tl.float32) * scale[:, None]
    if IS_V:
        values = tl.where(values == values, values, 0.0)
        if INT8:
            values = tl.where(tl.abs(values) <= _FP16_MAX, values, 0.0)
    tl.store(out + (row * D)[:, None] + col, values.to(out.dtype.element_ty), mask=box)


@triton.jit(do_not_specialize=["count"])
def _dequantize_rows(
    k_memory: tl.tuple,
    v_memory: tl.tuple,
    k_strides: tl.tuple,
    v_strides: tl.tuple,
    pages: tl.tensor,
    count: tl.tensor,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One program takes ``ROWS`` heads of one side, ordered by token, then head."""
    rows = count.to(tl.int64) * SIZE * HEADS
    if tl.program_id(1) == 0:
        _dequantize_side(k_memory, k_strides, pages, rows, SIZE, HEADS, D_K, False, COLS, ROWS)
    else:
        _dequantize_side(v_memory, v_strides, pages, rows, SIZE, HEADS, D_V, True, COLS, ROWS)
