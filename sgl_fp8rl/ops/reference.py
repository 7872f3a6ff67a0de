"""Block FP8 in plain torch: the reference for every kernel, and the arithmetic of the CPU platform.

Weights carry one FP32 scale for each 128x128 block, activations one for each token and 128
channels (the DeepSeek-V3 scheme, arXiv 2412.19437 section 3.3). A value is ``code * scale``. Scales
may be rounded up to powers of two, all that the OCP Microscaling specification's E8M0 holds: as by
``ceil_to_ue8m0`` of DeepGEMM, which needs them on Blackwell.

Shape suffixes: M tokens, N output features, K input features; n, k = N, K in blocks of 128
(the last block may be ragged). Leading dimensions, such as experts, come before the suffix.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

Weight = tuple[torch.Tensor, torch.Tensor]
"""Codes ``[E, N, K]`` and scales ``[E, N/128, K/128]``."""

BLOCK = 128
FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0
# A block of zeros still gets a positive, normal scale: dividing by it never gives NaN or Inf,
# also where a device flushes denormals.
AMAX_FLOOR = 1e-10
LARGEST_SCALE = 2.0**48
"""Of a weight that an update brings, as of keys and values. A product of two operands with such
scales fits FP32: 448 ** 2 * 2 ** 96, times 4096 channels, is below 2 ** 126."""


EXPONENT, CARRY = 0x7F800000, 0x1FFFFF
"""The exponent of FP32, and what carries into it from every mantissa above that of 448."""


def num_blocks(size: int) -> int:
    """How many blocks of 128 cover ``size`` elements."""
    return -(-size // BLOCK)


def scale_of(amax: torch.Tensor, *, power_of_two: bool = False) -> torch.Tensor:
    """``amax / 448``, FP32 and positive; NaN or Inf where that is.

    Args:
        power_of_two: instead, the smallest power of two that is not below ``amax / 448``; Inf where
            amax is NaN.
    """
    amax = amax.clamp(min=AMAX_FLOOR)
    if power_of_two:  # 448 is 1.75 * 2**8: nothing is rounded, so all devices agree
        amax = amax.nan_to_num(torch.inf, torch.inf)  # the carry of some NaNs would make 0
        bits = (amax * 2.0**-8).contiguous().view(torch.int32)
        return ((bits + CARRY) & EXPONENT).view(torch.float32)
    # By a tensor: CUDA divides by a Python number as a product with its reciprocal, an ulp apart.
    return amax / torch.full_like(amax, FP8_MAX)


def encode(scaled: torch.Tensor) -> torch.Tensor:
    """The nearest E4M3 numbers."""
    # The cast itself does not saturate on every torch version (2.11 makes NaN of 465).
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)


def _spread(scale: torch.Tensor, rows: int | None, cols: int) -> torch.Tensor:
    """Repeat each block's scale over its elements and cut the ragged end off."""
    scale = scale.repeat_interleave(BLOCK, dim=-1)[..., :cols]
    if rows is not None:
        scale = scale.repeat_interleave(BLOCK, dim=-2)[..., :rows, :]
    return scale


def quantize_weight(
    weight_NK: torch.Tensor, *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to one scale for each 128x128 block.

    Args:
        weight_NK: BF16, FP16 or FP32, ``[..., N, K]``.
        power_of_two: here and below, round scales up to powers of two.

    Returns:
        ``codes_NK`` float8_e4m3fn of the same shape, and ``scale_inv_nk`` FP32
        ``[..., ceil(N/128), ceil(K/128)]``: what a code is multiplied by. The scale of a block with
        NaN or Inf is that.
    """
    rows, cols = weight_NK.shape[-2:]
    weight = weight_NK.float()
    pad = (0, -cols % BLOCK, 0, -rows % BLOCK)
    padded = F.pad(weight, pad) if any(pad) else weight
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    # [..., n, 128, k, 128] -> [..., n, k]
    scale_inv_nk = scale_of(blocks.abs().amax(dim=(-1, -3)), power_of_two=power_of_two)
    return encode(weight / _spread(scale_inv_nk, rows, cols)), scale_inv_nk


def dequantize_weight(
    codes_NK: torch.Tensor, scale_inv_nk: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """``codes * scale`` in FP32, then cast to ``dtype``: ``[..., N, K]``."""
    rows, cols = codes_NK.shape[-2:]
    return (codes_NK.float() * _spread(scale_inv_nk, rows, cols)).to(dtype)


def quantize_activation(
    x_MK: torch.Tensor, *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to one scale for each token and 128 channels.

    Args:
        x_MK: BF16, FP16 or FP32, ``[..., M, K]``.

    Returns:
        ``codes_MK`` float8_e4m3fn and ``scales_Mk`` FP32 ``[..., M, ceil(K/128)]``. Where an
        activation is NaN or Inf, its scale is, so all that is computed of its token is NaN.
    """
    cols = x_MK.shape[-1]
    x = x_MK.float()
    padded = F.pad(x, (0, -cols % BLOCK)) if cols % BLOCK else x
    amax_Mk = padded.unflatten(-1, (-1, BLOCK)).abs().amax(dim=-1)
    scales_Mk = scale_of(amax_Mk, power_of_two=power_of_two)
    return encode(x / _spread(scales_Mk, None, cols)), scales_Mk


def dequantize_activation(
    codes_MK: torch.Tensor, scales_Mk: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """``codes * scale`` in FP32, then cast to ``dtype``: ``[..., M, K]``."""
    return (codes_MK.float() * _spread(scales_Mk, None, codes_MK.shape[-1])).to(dtype)


def fp8_linear(
    x_MK: torch.Tensor,
    codes_NK: torch.Tensor,
    scale_inv_nk: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    power_of_two: bool = False,
) -> torch.Tensor:
    """What a W8A8 block GEMM computes, in FP32: ``dequant(quant(x)) @ dequant(W).T + bias``,
    ``[..., M, N]`` in the dtype of ``x_MK``; ``power_of_two`` is that of the scales of activations.
    """
    x = dequantize_activation(*quantize_activation(x_MK, power_of_two=power_of_two))
    y = x @ dequantize_weight(codes_NK, scale_inv_nk).T
    if bias_N is not None:
        y = y + bias_N.float()
    return y.to(x_MK.dtype)


def fp8_experts(
    x_MH: torch.Tensor,
    w13: Weight,
    w2: Weight,
    topk_weights_MT: torch.Tensor,
    topk_ids_MT: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor],
    linear: Callable[..., torch.Tensor] = fp8_linear,
) -> torch.Tensor:
    """Run gated experts one by one.

    Suffixes: M tokens, H hidden, T experts per token. ``w13`` has the gate rows, then the up rows.

    Returns:
        FP32 ``[M, H]``: the weighted sum of the experts' results, which have the dtype of ``x_MH``.
    """
    out_MH = torch.zeros_like(x_MH, dtype=torch.float32)
    for expert in topk_ids_MT.unique().tolist():
        if expert < 0:
            continue  # the expert lives on another rank
        tokens, slots = (topk_ids_MT == expert).nonzero(as_tuple=True)
        gate_up = linear(x_MH[tokens], *(part[expert] for part in w13))
        gate, up = gate_up.chunk(2, dim=-1)
        down = linear(activation(gate) * up, *(part[expert] for part in w2))
        weight = topk_weights_MT[tokens, slots].float().unsqueeze(-1)
        out_MH.index_add_(0, tokens, down.float() * weight)
    return out_MH
