"""Quantized activations on the GPU: one launch computes y, its codes and its scales.

The bytes are those of ``activation.py``, with the GPU's approximate reciprocal and exponential: the
instructions that SGLang's kernels compile to on Hopper. Only results are allocated and nothing is
synchronized, so a CUDA graph can capture it. No kernel depends on the number of tokens.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sgl_fp8rl.ops.activation import (
    INVERSE_MAX,
    LARGEST_DIVISOR,
    Channels,
    Quantized,
    check,
    check_norm,
    empty_quantized,
)
from sgl_fp8rl.ops.reference import BLOCK, FP8_MAX
from sgl_fp8rl.ops.weight_quant_triton import FLOOR, power_of_two_scale

_GROUPS = tl.constexpr(8)
"""Groups of 128 channels per program, for kernels without a reduction over a row."""
# Eight channels per thread: 16 bytes of BF16, and no layout conversion before the codes.
_GROUPS_OF_WARP = 2
# Sixteen if nothing else is computed: 49 us instead of 80 for 16384 tokens of 4096 on an H200.
_PLAIN_GROUPS_OF_WARP = 4
_MAX_WARPS = 32


def quantize_tokens(
    x_MK: torch.Tensor,
    *,
    by_row: bool = False,
    within: Channels | None = None,
    power_of_two: bool = False,
) -> Quantized:
    """``activation.quantize_tokens`` on the current stream; there is what it takes and raises."""
    check(x_MK, within=within)
    return _quantize_tiles(x_MK, None, by_row, within, power_of_two, silu=False)


def silu_mul_quantize(
    gate_up_M2I: torch.Tensor, *, within: Channels | None = None, power_of_two: bool = False
) -> tuple[torch.Tensor, Quantized]:
    """``activation.silu_mul_quantize`` on the current stream; there is what it takes and raises."""
    check(gate_up_M2I, halves=2, within=within)
    y_MI = gate_up_M2I.new_empty((len(gate_up_M2I), gate_up_M2I.shape[1] // 2))
    return y_MI, _quantize_tiles(gate_up_M2I, y_MI, False, within, power_of_two, silu=True)


def silu_mul_codes(
    gate_up_M2I: torch.Tensor, *, by_row: bool = False, power_of_two: bool = False
) -> Quantized:
    """``activation.silu_mul_codes`` on the current stream; there is what it takes and raises."""
    check(gate_up_M2I, halves=2)
    return _quantize_tiles(gate_up_M2I, None, by_row, None, power_of_two, silu=True)


def rms_norm_quantize(
    x_MK: torch.Tensor,
    weight_K: torch.Tensor,
    eps: float,
    residual_MK: torch.Tensor | None = None,
    *,
    by_row: bool = False,
    within: Channels | None = None,
    power_of_two: bool = False,
) -> tuple[torch.Tensor, Quantized]:
    """``activation.rms_norm_quantize`` on the current stream; there is what it takes and raises."""
    check_norm(x_MK, weight_K, residual_MK, within)
    M, K = x_MK.shape
    lead, size = within or (0, K)
    y_MK = x_MK.new_empty((M, K)) if residual_MK is None else x_MK
    residual = x_MK if residual_MK is None else residual_MK
    quantized = empty_quantized(M, size, x_MK.device, by_row=by_row)
    groups = triton.next_power_of_2(size // BLOCK)
    warps = min(max(groups // _GROUPS_OF_WARP, 1), _MAX_WARPS)
    if M:
        with torch.cuda.device_of(x_MK):  # a kernel starts on the current device
            _norm_rows[(M,)](
                x_MK,
                residual,
                weight_K,
                y_MK,
                *quantized,
                x_MK.stride(0),
                residual.stride(0),
                y_MK.stride(0),
                *quantized.scales_Mk.stride(),
                eps,
                K=size,
                GROUPS=groups,
                LEAD=lead,
                LENGTH=K,
                ADD=residual_MK is not None,
                POWER_OF_TWO=power_of_two,
                **_options(x_MK.device, warps),
            )
    return y_MK, quantized


def _quantize_tiles(
    x: torch.Tensor,
    y: torch.Tensor | None,
    by_row: bool,
    within: Channels | None,
    power_of_two: bool,
    *,
    silu: bool,
) -> Quantized:
    """Quantize x, or with ``silu`` the product of its halves, which is written to y."""
    M, length = len(x), x.shape[1] // 2 if silu else x.shape[1]
    lead, K = within or (0, length)
    quantized = empty_quantized(M, K, x.device, by_row=by_row)
    tiles = triton.cdiv(K // BLOCK, _GROUPS.value)
    if M:
        with torch.cuda.device_of(x):  # a kernel starts on the current device
            _some_groups[(M * tiles,)](
                x,
                y,
                *quantized,
                x.stride(0),
                *quantized.scales_Mk.stride(),
                K=K,
                TILES=tiles,
                LEAD=lead,
                LENGTH=length,
                SILU=silu,
                POWER_OF_TWO=power_of_two,
                **_options(
                    x.device, _GROUPS.value // (_GROUPS_OF_WARP if silu else _PLAIN_GROUPS_OF_WARP)
                ),
            )
    return quantized


def _options(device: torch.device, warps: int) -> dict[str, Any]:
    """Compile and launch options.

    From Hopper on a kernel starts while its predecessor ends (programmatic dependent launch), like
    SGLang's kernels, and waits for it before it reads anything.
    """
    overlap = not _INTERPRETED and _capability(device)[0] >= 9
    options = {"num_warps": warps, "OVERLAP": overlap}
    # No fused multiply-add: products are rounded where SGLang rounds them.
    return options | {"enable_fp_fusion": False} | ({"launch_pdl": True} if overlap else {})


_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_capability = functools.cache(torch.cuda.get_device_capability)


_SIZE = tl.constexpr(BLOCK)
_LARGEST = tl.constexpr(FP8_MAX)
_INVERSE = tl.constexpr(INVERSE_MAX)
_DIVISOR = tl.constexpr(LARGEST_DIVISOR)


@triton.jit
def _reciprocal(x: tl.tensor) -> tl.tensor:
    if _INTERPRETED:
        return tl.where(x > _DIVISOR, 0.0, tl.div_rn(1.0, x))
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _exp_of_negative(x: tl.tensor) -> tl.tensor:
    """exp(-x) as 2 to the power of -x * log2(e), like ``__expf``."""
    if _INTERPRETED:
        return tl.exp(-x)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;",
        "=f,f",
        [x * -1.4426950408889634],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _channels(
    group: tl.tensor, K: tl.constexpr, LEAD: tl.constexpr, LENGTH: tl.constexpr
) -> tl.tuple:
    """The channels of groups of ``K`` channels, of which ``LENGTH`` begin at ``LEAD`` among zeros:
    which of those each is, and whether it is one."""
    col = group[:, None] * _SIZE + tl.arange(0, _SIZE)[None, :]
    if LENGTH == K:  # a mask for each channel would be slower
        inside = (group < K // _SIZE)[:, None]
    else:
        col = col - LEAD
        inside = (col >= 0) & (col < LENGTH)
    return col, inside


@triton.jit
def _store_quantized(
    y: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    group: tl.tensor,
    token_stride: tl.tensor,
    group_stride: tl.tensor,
    K: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
) -> None:
    """Quantize ``y`` [groups, 128], BF16 values of one row, and store codes and scales."""
    inside = group < K // _SIZE
    values = y.to(tl.float32)
    magnitude = tl.where(values == values, tl.abs(values), 0.0)
    amax = tl.maximum(tl.max(magnitude, 1), FLOOR)
    if POWER_OF_TWO:
        scale = power_of_two_scale(amax)
        quotient = values * tl.div_rn(1.0, scale)[:, None]
    else:
        scale = amax * _INVERSE
        quotient = values * (_reciprocal(amax) * _LARGEST)[:, None]
    # One clamp, also for NaN: rounding undoes everything below -448.
    quotient = tl.where(quotient < _LARGEST, quotient, _LARGEST)
    col = group[:, None] * _SIZE + tl.arange(0, _SIZE)[None, :]
    tl.store(codes + row * K + col, quotient.to(tl.float8e4nv), mask=inside[:, None])
    place = scales + row * token_stride + group * group_stride
    tl.store(place, scale, mask=inside)


@triton.jit(do_not_specialize=["group_stride"])
def _some_groups(
    x: tl.tensor,
    y: tl.tensor | None,
    codes: tl.tensor,
    scales: tl.tensor,
    row_stride: tl.tensor,
    token_stride: tl.tensor,
    group_stride: tl.tensor,
    K: tl.constexpr,
    TILES: tl.constexpr,
    LEAD: tl.constexpr,
    LENGTH: tl.constexpr,
    SILU: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One program quantizes ``_GROUPS`` groups of one row; with ``SILU`` x is gate and up."""
    row = (tl.program_id(0) // TILES).to(tl.int64)
    group = tl.program_id(0) % TILES * _GROUPS + tl.arange(0, _GROUPS)
    col, inside = _channels(group, K, LEAD, LENGTH)
    source = x + row * row_stride + col
    if OVERLAP:
        gdc_wait()
    values = tl.load(source, mask=inside, other=0.0)
    if SILU:
        up = tl.load(source + LENGTH, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_launch_dependents()
    if SILU:
        gate = values.to(tl.float32)
        sigmoid = _reciprocal(1.0 + _exp_of_negative(gate))
        values = (gate * sigmoid * up).to(tl.bfloat16)
        if y is not None:
            tl.store(y + row * LENGTH + col, values, mask=inside)
    _store_quantized(values, codes, scales, row, group, token_stride, group_stride, K, POWER_OF_TWO)


@triton.jit(do_not_specialize=["group_stride"])
def _norm_rows(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    y_stride: tl.tensor,
    token_stride: tl.tensor,
    group_stride: tl.tensor,
    eps: tl.tensor,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    LEAD: tl.constexpr,
    LENGTH: tl.constexpr,
    ADD: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One program normalizes one row, which it keeps in registers."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    col, inside = _channels(group, K, LEAD, LENGTH)
    if OVERLAP:
        gdc_wait()
    h = tl.load(x + row * x_stride + col, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        other = tl.load(residual + row * residual_stride + col, mask=inside, other=0.0)
    gain = tl.load(weight + col, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_launch_dependents()
    if ADD:
        h += other.to(tl.float32)
        tl.store(residual + row * residual_stride + col, h.to(tl.bfloat16), mask=inside)
    mean = tl.div_rn(tl.sum(tl.sum(h * h, 1), 0), LENGTH * 1.0)
    product = (h * tl.rsqrt(mean + eps) * gain).to(tl.bfloat16)
    tl.store(y + row * y_stride + col, product, mask=inside)
    _store_quantized(
        product, codes, scales, row, group, token_stride, group_stride, K, POWER_OF_TWO
    )
