"""QK-norm, rotary embedding and 8-bit store in a decode step: one launch per layer.

The bytes and the statistics are those of ``qk_rope.py`` and of SGLang's kernels (``qknorm.cuh``,
``rope.cuh``) followed by ``kv_triton.py``, except for the order in which a
norm's squares are summed and the GPU's approximate root: rarely a BF16 value differs by one ulp.
Only results are allocated and nothing is synchronized, so a CUDA graph can capture it.
"""

import torch
import triton
import triton.language as tl

from sgl_fp8rl.ops.kv import Cache
from sgl_fp8rl.ops.kv_int8_triton import (
    bf16_bits,
    clipped_int8,
    codes_of,
    hadamard,
    log_block,
    scale_of,
    scales_of,
    to_fp16,
)
from sgl_fp8rl.ops.kv_triton import PADDING, clipped, count, magnitude, saturate
from sgl_fp8rl.ops.qk_rope import Norms, check
from sgl_fp8rl.ops.weight_quant_triton import bits_of

# A program handles this many heads of one token, all of q, of K or of V. Neither depends on the
# batch: serving compiles nothing after the first decode.
_ROWS, _WARPS = tl.constexpr(8), 4


def norm_rope_store(
    qkv_TC: torch.Tensor,
    positions_T: torch.Tensor,
    cos_sin_PD: torch.Tensor,
    norms: Norms | None,
    slots_T: torch.Tensor,
    cache: Cache,
) -> torch.Tensor:
    """``qk_rope.norm_rope_store`` on the current stream; there is what it takes and raises."""
    N, H, D = check(qkv_TC, positions_T, cos_sin_PD, norms, slots_T, cache)
    T = len(qkv_TC)
    is_int8 = cache.token_scales_HS is not None
    q_TC = qkv_TC.new_empty(T, N * D, dtype=torch.float16 if is_int8 else torch.bfloat16)
    if T == 0:
        return q_TC
    scales = scales_of(cache)
    blocks = 2 * triton.cdiv(H, _ROWS.value) + triton.cdiv(N, _ROWS.value)
    with torch.cuda.device_of(qkv_TC):  # a kernel starts on the current device
        _some_heads[(T, blocks)](
            qkv_TC,
            q_TC,
            positions_T,
            cos_sin_PD,
            # a placeholder without norms, which the kernel does not read
            qkv_TC if norms is None else norms.q_D,
            qkv_TC if norms is None else norms.k_D,
            0.0 if norms is None else norms.eps,
            slots_T,
            cache.k_SHD,
            cache.v_SHD,
            *scales,
            cache.stats_C,
            qkv_TC.stride(0),
            positions_T.stride(0),
            cos_sin_PD.stride(0),
            slots_T.stride(0),
            *cache.k_SHD.stride()[:2],
            *cache.v_SHD.stride()[:2],
            scales[0].stride(0),
            scales[1].stride(0),
            Q_HEADS=N,
            KV_HEADS=H,
            D=D,
            LOG_D=log_block(D),
            NORMED=norms is not None,
            INT8=is_int8,
            # with fewer Triton rotates wide heads through shared memory
            num_warps=2 * _WARPS if is_int8 and D > 128 else _WARPS,
        )
    return q_TC


@triton.jit
def _halves(heads: tl.tensor, inside: tl.tensor, D: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Load both halves of heads that start at ``heads`` ``[_ROWS, 1]``: FP32 ``[_ROWS, D / 2]``."""
    first = heads + tl.arange(0, D // 2)[None, :]
    low = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(first + D // 2, mask=inside, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _rotated(
    low: tl.tensor,
    high: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    cos_sin: tl.tensor,
    D: tl.constexpr,
    NORMED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Both halves, normed and rotated: BF16 values as FP32."""
    col = tl.arange(0, D // 2)[None, :]
    cos = tl.load(cos_sin + col).to(tl.float32)
    sin = tl.load(cos_sin + D // 2 + col).to(tl.float32)
    if NORMED:
        w_low = tl.load(weight + col).to(tl.float32)
        w_high = tl.load(weight + D // 2 + col).to(tl.float32)
        total = tl.sum(low * low + high * high, axis=1)
        root = tl.rsqrt(total * (1 / D) + eps)[:, None]
        low = (low * root * w_low).to(tl.bfloat16).to(tl.float32)
        high = (high * root * w_high).to(tl.bfloat16).to(tl.float32)
    # the products that nvcc fuses in SGLang's kernel; Triton's negation loses the sign of zero
    turned_low = tl.fma(low, cos, high * sin * -1.0)
    turned_high = tl.fma(high, cos, low * sin)
    return (
        turned_low.to(tl.bfloat16).to(tl.float32),
        turned_high.to(tl.bfloat16).to(tl.float32),
    )


@triton.jit
def _spread(
    low: tl.tensor, high: tl.tensor, D: tl.constexpr, LOG_D: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """``kv_int8.rotate``: both halves times a matrix of all channels."""
    low = hadamard(low, _ROWS, D // 2, LOG_D - 1)
    high = hadamard(high, _ROWS, D // 2, LOG_D - 1)
    return (low + high) * D**-0.5, (low - high) * D**-0.5


@triton.jit
def _scale(scales: tl.tensor, slot: tl.tensor, inside: tl.tensor, INT8: tl.constexpr) -> tl.tensor:
    """Of E4M3 the scales of heads; of INT8 where the scales of this token go."""
    if INT8:
        return scales + slot * 2
    else:
        return tl.load(scales, mask=inside, other=1.0)


@triton.jit
def _store(
    low: tl.tensor,
    high: tl.tensor,
    scale: tl.tensor,
    cache: tl.tensor,
    inside: tl.tensor,
    slot: tl.tensor,
    largest: tl.tensor,
    stats: tl.tensor,
    SIDE: tl.constexpr,
    D: tl.constexpr,
    LOG_D: tl.constexpr,
    INT8: tl.constexpr,
) -> None:
    """Store heads whose first codes are at ``cache`` ``[_ROWS, 1]``, with statistics."""
    first = cache + tl.arange(0, D // 2)[None, :]
    real = inside & (slot != PADDING)
    bits = tl.maximum(magnitude(low, real), magnitude(high, real))
    if INT8:
        if SIDE == 0:
            low, high = _spread(low, high, D, LOG_D)
        top = tl.max(tl.maximum(bits_of(low), bits_of(high)), axis=1)
        found = scale_of(top)[:, None]
        tl.store(first, codes_of(low, found), mask=inside)
        tl.store(first + D // 2, codes_of(high, found), mask=inside)
        tl.store(scale, bf16_bits(found), mask=inside)
        beyond = clipped_int8(low, real) + clipped_int8(high, real)
    else:
        low_quotient = tl.div_rn(low, scale)
        high_quotient = tl.div_rn(high, scale)
        tl.store(first, saturate(low_quotient).to(tl.float8e4nv), mask=inside)
        tl.store(first + D // 2, saturate(high_quotient).to(tl.float8e4nv), mask=inside)
        beyond = clipped(low_quotient, real) + clipped(high_quotient, real)
    count(beyond, bits, largest, stats, SIDE)


# Read one by one, so layers with different strides share one compiled kernel.
@triton.jit(
    do_not_specialize_on_alignment=[
        "positions",
        "slots",
        "k_scales",
        "v_scales",
        "stats",
    ]
)
def _some_heads(
    qkv: tl.tensor,
    q_out: tl.tensor,
    positions: tl.tensor,
    cos_sin: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    eps: tl.tensor,
    slots: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    stats: tl.tensor,
    token_stride: tl.tensor,
    position_stride: tl.tensor,
    cos_sin_stride: tl.tensor,
    slots_stride: tl.tensor,
    k_slot_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_slot_stride: tl.tensor,
    v_head_stride: tl.tensor,
    k_scale_stride: tl.tensor,
    v_scale_stride: tl.tensor,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    LOG_D: tl.constexpr,
    NORMED: tl.constexpr,
    INT8: tl.constexpr,
) -> None:
    """One program handles ``_ROWS`` heads of K, V or q, in this order: statistics start first."""
    KV_BLOCKS: tl.constexpr = (KV_HEADS + _ROWS - 1) // _ROWS
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = qkv + token * token_stride
    some = tl.arange(0, _ROWS)[:, None]
    if block < KV_BLOCKS:
        head = block * _ROWS + some
        inside = head < KV_HEADS
        slot = tl.load(slots + token * slots_stride)
        turn = cos_sin + tl.load(positions + token * position_stride) * cos_sin_stride
        low, high = _halves(row + (Q_HEADS + head) * D, inside, D)
        scale = _scale(k_scales + head * k_scale_stride, slot, inside, INT8)
        largest = tl.load(stats + 3)
        low, high = _rotated(low, high, k_weight, eps, turn, D, NORMED)
        cache = k_cache + slot * k_slot_stride + head.to(tl.int64) * k_head_stride
        _store(low, high, scale, cache, inside, slot, largest, stats, 0, D, LOG_D, INT8)
        if (block == 0) & (slot != PADDING):
            tl.atomic_add(stats, tl.full((), 1, tl.int64), sem="relaxed")
    elif block < 2 * KV_BLOCKS:
        head = (block - KV_BLOCKS) * _ROWS + some
        inside = head < KV_HEADS
        slot = tl.load(slots + token * slots_stride)
        low, high = _halves(row + (Q_HEADS + KV_HEADS + head) * D, inside, D)
        scale = _scale(v_scales + head * v_scale_stride, slot, inside, INT8)
        largest = tl.load(stats + 4)
        cache = v_cache + slot * v_slot_stride + head.to(tl.int64) * v_head_stride
        _store(low, high, scale, cache, inside, slot, largest, stats, 1, D, LOG_D, INT8)
    else:
        head = (block - 2 * KV_BLOCKS) * _ROWS + some
        inside = head < Q_HEADS
        turn = cos_sin + tl.load(positions + token * position_stride) * cos_sin_stride
        low, high = _halves(row + head * D, inside, D)
        low, high = _rotated(low, high, q_weight, eps, turn, D, NORMED)
        first = q_out + token * (Q_HEADS * D) + head * D + tl.arange(0, D // 2)[None, :]
        if INT8:
            low, high = _spread(low, high, D, LOG_D)
            tl.store(first, to_fp16(low), mask=inside)
            tl.store(first + D // 2, to_fp16(high), mask=inside)
        else:
            tl.store(first, low.to(tl.bfloat16), mask=inside)
            tl.store(first + D // 2, high.to(tl.bfloat16), mask=inside)
