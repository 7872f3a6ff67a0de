"""INT8 keys, values and queries on the GPU; ``kv_triton.py`` stores keys and values.

The bytes are those of ``kv_int8.py``: the rotation adds in its order, a pair at a time, so that
what a token has depends on no other. Only results are allocated and nothing is synchronized.
"""

import torch
import triton
import triton.language as tl

from sgl_fp8rl.ops.kv_int8 import (
    FP16_MAX,
    LARGEST_CODE,
    LARGEST_SCALE,
    LEAST_SCALE,
    block_of,
)
from sgl_fp8rl.ops.paged_decode import Codes

# Elements per program. Small programs spread a decode batch over the SMs; large ones keep more
# loads in flight. Nothing else depends on the batch: serving compiles nothing after the first
# decode and the first prefill.
_SMALL, _LARGE = 1024, 4096
_MANY = 2**20
"""Elements of K from which programs are large: eight programs per SM of an H200."""


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


def rows_of(heads: int, width: int) -> int:
    """How many of so many heads, padded to a width, a program takes."""
    return max((_LARGE if heads * width >= _MANY else _SMALL) // width, 1)


def scales_of(codes: Codes) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of K and of V: of INT8 views of their BF16 bits, int16 ``[H, S]``."""
    if codes.token_scales_HS is None:
        assert codes.k_scale_H is not None and codes.v_scale_H is not None
        return codes.k_scale_H, codes.v_scale_H
    bits = codes.token_scales_HS.view(torch.int16)
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
