"""Stores of 8-bit keys and values on the GPU: one launch for K and V of a layer, with statistics.

The bytes and the statistics are those of ``kv.py``. Only results are allocated and nothing is
synchronized, so a CUDA graph can capture it; scales and slots are read at replay.
"""

import torch
import triton
import triton.language as tl

from sgl_fp8rl.ops.kv import PADDING_SLOT, Cache, check_store
from sgl_fp8rl.ops.kv_int8_triton import (
    bf16_bits,
    clipped_int8,
    codes_of,
    hadamard,
    log_block,
    rows_of,
    scale_of,
    scales_of,
)
from sgl_fp8rl.ops.reference import FP8_MAX
from sgl_fp8rl.ops.weight_quant_triton import INF, bits_of


def store_kv(
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    slots_T: torch.Tensor,
    cache: Cache,
    *,
    read_back: bool,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """``kv.store_kv`` on the current stream; there is what it takes, returns and raises."""
    check_store(k_THD, v_THD, slots_T, cache)
    T, H, D_K = k_THD.shape
    D_V = v_THD.shape[2]
    dtype = k_THD.dtype if cache.token_scales_HS is None else torch.float16
    # Without read_back these are never written to.
    k_back, v_back = (
        (x_THD.new_empty(x_THD.shape, dtype=dtype) if read_back else x_THD)
        for x_THD in (k_THD, v_THD)
    )
    k_scales, v_scales = scales_of(cache)
    width = triton.next_power_of_2(max(D_K, D_V))
    rows = rows_of(T * H, width)
    if T * H:
        with torch.cuda.device_of(k_THD):  # a kernel starts on the current device
            _store_rows[(triton.cdiv(T * H, rows), 2)](
                (k_THD, cache.k_SHD, k_scales, k_back),
                (v_THD, cache.v_SHD, v_scales, v_back),
                (*k_THD.stride()[:2], *cache.k_SHD.stride()[:2], *k_scales.stride()),
                (*v_THD.stride()[:2], *cache.v_SHD.stride()[:2], *v_scales.stride()),
                slots_T,
                cache.stats_C,
                T * H,
                HEADS=H,
                D_K=D_K,
                D_V=D_V,
                LOG_BLOCK=log_block(D_K),
                COLS=width,
                ROWS=rows,
                READ_BACK=read_back,
                num_warps=4,
            )
    return (k_back, v_back) if read_back else None


_LARGEST = tl.constexpr(FP8_MAX)
PADDING = tl.constexpr(PADDING_SLOT)


@triton.jit
def saturate(quotient: tl.tensor) -> tl.tensor:
    """Clamped to the range of E4M3; NaN becomes the one whose code is 0x7F."""
    clamped = tl.minimum(tl.maximum(quotient, -_LARGEST), _LARGEST)
    return tl.where(quotient == quotient, clamped, float("nan"))


@triton.jit
def clipped(quotient: tl.tensor, real: tl.tensor) -> tl.tensor:
    """1 where an unpadded element exceeds E4M3, int32."""
    return (real & (tl.abs(quotient) > _LARGEST)).to(tl.int32)


@triton.jit
def magnitude(values: tl.tensor, real: tl.tensor) -> tl.tensor:
    """``bits_of``; 0 where an element is padding or not finite."""
    bits = bits_of(values)
    return tl.where(real & (bits < INF), bits, 0)


@triton.jit
def count(
    beyond: tl.tensor,
    bits: tl.tensor,
    largest: tl.tensor,
    stats: tl.tensor,
    SIDE: tl.constexpr,
) -> None:
    """Add a tile of ``clipped`` and of ``magnitude`` to the statistics of K (side 0) or V (1).

    ``largest`` was read from the statistics before: an outdated value is too small, which costs one
    atomic more.
    """
    total = tl.sum(beyond)
    if total > 0:
        tl.atomic_add(stats + 1 + SIDE, total.to(tl.int64), sem="relaxed")
    top = tl.max(bits).to(tl.int64)
    if top > largest:
        tl.atomic_max(stats + 3 + SIDE, top, sem="relaxed")


@triton.jit
def _store_side(
    memory: tl.tuple,
    strides: tl.tuple,
    slots: tl.tensor,
    stats: tl.tensor,
    rows: tl.tensor,
    SIDE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    LOG_BLOCK: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    READ_BACK: tl.constexpr,
) -> None:
    """Store ``ROWS`` heads of K (side 0) or of V (side 1), ordered by token, then head."""
    x, cache, scales, back = memory
    INT8: tl.constexpr = cache.dtype.element_ty == tl.int8
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)[None, :]
    inside = row < rows
    token = (row // HEADS).to(tl.int64)  # a long prefill of wide rows exceeds 2**31 elements
    head = row % HEADS
    slot = tl.load(slots + token, mask=inside, other=PADDING)
    scales += head * strides[4]
    if not INT8:
        scale = tl.load(scales, mask=inside, other=1.0)[:, None]
    real = (inside & (slot != PADDING))[:, None] & (col < D)
    box = inside[:, None] & (col < D)

    largest = tl.load(stats + 3 + SIDE)
    source = x + (token * strides[0] + head * strides[1])[:, None] + col
    values = tl.load(source, mask=box, other=0.0).to(tl.float32)
    if INT8:
        stored = values
        if SIDE == 0:
            stored = hadamard(values, ROWS, COLS, LOG_BLOCK) * 2.0 ** (-LOG_BLOCK / 2)
        by_token = scale_of(tl.max(bits_of(stored), axis=1))
        tl.store(scales + slot * strides[5], bf16_bits(by_token), mask=inside)
        codes = codes_of(stored, by_token[:, None])
        read = codes.to(tl.float32) * by_token[:, None]
        beyond = clipped_int8(stored, real)
    else:
        quotient = tl.div_rn(values, scale)
        codes = saturate(quotient).to(tl.float8e4nv)
        read = codes.to(tl.float32)
        beyond = clipped(quotient, real)
    tl.store(cache + (slot * strides[2] + head * strides[3])[:, None] + col, codes, mask=box)
    if READ_BACK:
        place = back + (row.to(tl.int64) * D)[:, None] + col
        tl.store(place, read.to(back.dtype.element_ty), mask=box)

    count(beyond, magnitude(values, real), largest, stats, SIDE)
    if SIDE == 0:
        tokens = tl.sum((inside & (slot != PADDING) & (head == 0)).to(tl.int32))
        if tokens > 0:
            tl.atomic_add(stats, tokens.to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def _store_rows(
    k_memory: tl.tuple,
    v_memory: tl.tuple,
    k_strides: tl.tuple,
    v_strides: tl.tuple,
    slots: tl.tensor,
    stats: tl.tensor,
    rows: tl.tensor,
    HEADS: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    LOG_BLOCK: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
    READ_BACK: tl.constexpr,
) -> None:
    """One program stores ``ROWS`` heads of one side."""
    if tl.program_id(1) == 0:
        _store_side(
            k_memory, k_strides, slots, stats, rows, 0, HEADS, D_K, LOG_BLOCK, COLS, ROWS, READ_BACK
        )
    else:
        _store_side(
            v_memory, v_strides, slots, stats, rows, 1, HEADS, D_V, LOG_BLOCK, COLS, ROWS, READ_BACK
        )
