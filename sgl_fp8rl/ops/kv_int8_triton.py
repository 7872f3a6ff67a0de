"""INT8 keys and values on the GPU: one launch stores K and V of a layer, with statistics.

The bytes and the statistics are those of ``kv_int8.py``: the rotation adds in its order, a pair at
a time, so that what a token has depends on no other. Only results are allocated and nothing is
synchronized, so a CUDA graph can capture it; slots are read at replay.
"""
# Triton comes without types.
# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl

from sgl_fp8rl.ops.kv_int8 import (
    FP16_MAX,
    LARGEST_CODE,
    LARGEST_SCALE,
    LEAST_SCALE,
    block_of,
    check_store_int8,
)
from sgl_fp8rl.ops.kv_triton import PADDING, bits_of, count, magnitude, rows_of


def store_kv_int8(
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    slots_T: torch.Tensor,
    k_cache_SHD: torch.Tensor,
    v_cache_SHD: torch.Tensor,
    token_scales_HS: torch.Tensor,
    stats_C: torch.Tensor,
    *,
    read_back: bool,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """``kv_int8.store_kv_int8`` on the current stream; there is what it takes and raises."""
    check_store_int8(k_THD, v_THD, slots_T, k_cache_SHD, v_cache_SHD, token_scales_HS, stats_C)
    T, H, D_K = k_THD.shape
    D_V = v_THD.shape[2]
    # Without read_back these are never written to.
    k_back, v_back = (
        x_THD.new_empty(x_THD.shape if read_back else 0, dtype=torch.float16)
        for x_THD in (k_THD, v_THD)
    )
    width = triton.next_power_of_2(max(D_K, D_V))
    rows = rows_of(T * H, width)
    k_scales_HS, v_scales_HS = halves(token_scales_HS)
    if T * H:
        with torch.cuda.device_of(stats_C):  # a kernel starts on the current device
            _store_rows[(triton.cdiv(T * H, rows), 2)](
                (k_THD, k_cache_SHD, k_scales_HS, k_back),
                (v_THD, v_cache_SHD, v_scales_HS, v_back),
                (*k_THD.stride()[:2], *k_cache_SHD.stride()[:2], *k_scales_HS.stride()),
                (*v_THD.stride()[:2], *v_cache_SHD.stride()[:2], *v_scales_HS.stride()),
                slots_T,
                stats_C,
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


def rotate_queries(q_THD: torch.Tensor) -> torch.Tensor:
    """``kv_int8.rotate_queries`` on the current stream."""
    T, N, D = q_THD.shape
    if q_THD.stride(2) != 1:
        q_THD = q_THD.contiguous()
    out = q_THD.new_empty(q_THD.shape, dtype=torch.float16)
    width = triton.next_power_of_2(D)
    rows = rows_of(T * N, width)
    if T * N:
        with torch.cuda.device_of(q_THD):
            _rotate_rows[(triton.cdiv(T * N, rows),)](
                q_THD,
                out,
                T * N,
                *q_THD.stride()[:2],
                HEADS=N,
                D=D,
                LOG_BLOCK=log_block(D),
                COLS=width,
                ROWS=rows,
                num_warps=4,
            )
    return out


def to_bf16(x: torch.Tensor) -> torch.Tensor:
    """Contiguous FP16 in BF16, as torch casts it, which takes three times as long."""
    out = x.new_empty(x.shape, dtype=torch.bfloat16)
    if x.numel():
        with torch.cuda.device_of(x):
            _cast[(triton.cdiv(x.numel(), _ELEMENTS),)](x, out, x.numel(), SIZE=_ELEMENTS)
    return out


def halves(token_scales_HS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the BF16 bits of K's and of V's scales, int16 with a last stride of 2."""
    bits = token_scales_HS.view(torch.int16)
    return bits[:, ::2], bits[:, 1::2]


def log_block(dim: int) -> int:
    """The binary logarithm of ``block_of``."""
    return block_of(dim).bit_length() - 1


_ELEMENTS = 4096
"""That a program casts."""
_LARGEST_CODE = tl.constexpr(float(LARGEST_CODE))
_LARGEST = tl.constexpr(LARGEST_CODE * LARGEST_SCALE)
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)
_LARGEST_SCALE = tl.constexpr(LARGEST_SCALE)
_FRACTION = tl.constexpr(0xFFFFF)  # the bits of a scale after its first four
_FP16_MAX = tl.constexpr(FP16_MAX)
_ROUNDER = tl.constexpr(1.5 * 2**23)  # a sum with it is whole, and ends with the bits of an integer


@triton.jit
def hadamard(
    x: tl.tensor, ROWS: tl.constexpr, COLS: tl.constexpr, LOG_BLOCK: tl.constexpr
) -> tl.tensor:
    """FP32 ``[ROWS, COLS]`` times a matrix of +-1 for each ``2**LOG_BLOCK`` columns."""
    sign = (1 - 2 * tl.arange(0, 2)).to(tl.float32)[None, None, :, None]
    for log in tl.static_range(LOG_BLOCK):
        pairs = tl.reshape(x, [ROWS, COLS >> (log + 1), 2, 1 << log])
        bits = pairs.to(tl.int32, bitcast=True)
        partner = (tl.xor_sum(bits, 2, keep_dims=True) ^ bits).to(tl.float32, bitcast=True)
        x = tl.reshape(partner + pairs * sign, [ROWS, COLS])
    return x


@triton.jit
def to_fp16(x: tl.tensor) -> tl.tensor:
    """Saturated; NaN passes."""
    clamped = tl.minimum(tl.maximum(x, -_FP16_MAX), _FP16_MAX)
    return tl.where(x == x, clamped, x).to(tl.float16)


@triton.jit
def scale_of(largest: tl.tensor) -> tl.tensor:
    """The scale of heads whose largest ``bits_of`` these are."""
    amax = largest.to(tl.float32, bitcast=True)
    scale = tl.minimum(tl.maximum(tl.div_rn(amax, _LARGEST_CODE), _LEAST_SCALE), _LARGEST_SCALE)
    up = (scale.to(tl.int32, bitcast=True) + _FRACTION) & ~_FRACTION
    return tl.where(amax == amax, up.to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def codes_of(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """int8; 0 where the scale is NaN."""
    quotient = tl.div_rn(x, scale)
    clamped = tl.minimum(tl.maximum(quotient, -_LARGEST_CODE), _LARGEST_CODE)
    whole = (clamped + _ROUNDER).to(tl.int32, bitcast=True)
    return tl.where(scale == scale, whole, 0).to(tl.int8)


@triton.jit
def bf16_bits(scale: tl.tensor) -> tl.tensor:
    """As they are stored, int16: BF16 holds a scale exactly."""
    return (scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16)


@triton.jit
def clipped_int8(x: tl.tensor, real: tl.tensor) -> tl.tensor:
    """1 where an unpadded element exceeds the largest code times the largest scale, int32."""
    return (real & (tl.abs(x) > _LARGEST)).to(tl.int32)


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
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)[None, :]
    inside = row < rows
    token = (row // HEADS).to(tl.int64)  # a long prefill of wide rows exceeds 2**31 elements
    head = row % HEADS
    slot = tl.load(slots + token, mask=inside, other=PADDING)
    real = (inside & (slot != PADDING))[:, None] & (col < D)
    box = inside[:, None] & (col < D)

    largest = tl.load(stats + 3 + SIDE)
    source = x + (token * strides[0] + head * strides[1])[:, None] + col
    values = tl.load(source, mask=box, other=0.0).to(tl.float32)
    stored = values
    if SIDE == 0:
        stored = hadamard(values, ROWS, COLS, LOG_BLOCK) * 2.0 ** (-LOG_BLOCK / 2)
    scale = scale_of(tl.max(bits_of(stored), axis=1))
    codes = codes_of(stored, scale[:, None])
    target = cache + (slot * strides[2] + head * strides[3])[:, None] + col
    tl.store(target, codes, mask=box)
    tl.store(scales + head * strides[4] + slot * strides[5], bf16_bits(scale), mask=inside)
    if READ_BACK:
        read = (codes.to(tl.float32) * scale[:, None]).to(tl.float16)
        tl.store(back + (row.to(tl.int64) * D)[:, None] + col, read, mask=box)

    count(clipped_int8(stored, real), magnitude(values, real), largest, stats, SIDE)
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


@triton.jit(do_not_specialize=["rows"])
def _rotate_rows(
    x: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    LOG_BLOCK: tl.constexpr,
    COLS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """One program rotates ``ROWS`` heads, ordered by token, then head."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)[None, :]
    box = (row < rows)[:, None] & (col < D)
    token = (row // HEADS).to(tl.int64)
    source = x + (token * token_stride + row % HEADS * head_stride)[:, None] + col
    values = tl.load(source, mask=box, other=0.0).to(tl.float32)
    turned = hadamard(values, ROWS, COLS, LOG_BLOCK) * 2.0 ** (-LOG_BLOCK / 2)
    tl.store(out + (row.to(tl.int64) * D)[:, None] + col, to_fp16(turned), mask=box)


@triton.jit(do_not_specialize=["count"])
def _cast(x: tl.tensor, out: tl.tensor, count: tl.tensor, SIZE: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    values = tl.load(x + at, mask=at < count)
    tl.store(out + at, values.to(out.dtype.element_ty), mask=at < count)
