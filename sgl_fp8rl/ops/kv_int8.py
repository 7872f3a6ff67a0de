"""INT8 keys and values in plain torch: the reference for ``kv_int8_triton.py``, and the
implementation of CPU engines; ``kv.py`` stores them.

A value is ``code * scale``, one scale for each token and KV head. K is rotated first, after RoPE,
which spreads channels that are larger than others over all of a block. A query that is rotated
alike has the same product with it; V is not rotated.

Shape suffixes: T tokens, H heads (of K and V those of this rank), D head dim.
"""

import math

import torch

LARGEST_CODE = 127
LEAST_SCALE, LARGEST_SCALE = 2.0**-20, 2.0**9
"""Between them the product of a code and a scale is a value of FP16."""
LARGEST_BLOCK = 256
"""Channels that are rotated together, at most."""
FP16_MAX = 65504.0


def block_of(dim: int) -> int:
    """Channels that are rotated together: the largest power of two that divides the head dim."""
    return min(dim & -dim, LARGEST_BLOCK)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """``x`` times a Walsh-Hadamard matrix for each block of channels, FP32 ``[..., D]``.

    The matrix is in Sylvester's order, its entries are ``+-block ** -0.5``: it is symmetric and its
    own inverse. Sums are of two, near neighbours first, and the factor comes last.

    Args:
        x: BF16, FP16 or FP32 ``[..., D]``.
    """
    block = block_of(x.shape[-1])
    y = x.float()
    span = 1
    while span < block:
        low, high = y.unflatten(-1, (-1, 2, span)).unbind(-2)
        y = torch.stack((low + high, low - high), -2).flatten(-3)
        span *= 2
    return y * (1 / math.sqrt(block))


def rotate_queries(q_THD: torch.Tensor) -> torch.Tensor:
    """``rotate``, rounded once: FP16 ``[T, H, D]``, contiguous, saturated.

    FP16: BF16 would add a quarter of the error of the codes of K.
    """
    return rotate(q_THD).clamp(-FP16_MAX, FP16_MAX).half()  # NaN passes


def token_codes(x_THD: torch.Tensor, rotated: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of each head of each token, and their scale.

    A scale is ``max |x| / 127``, rounded up to four significant bits and between ``LEAST_SCALE``
    and ``LARGEST_SCALE``. A code is ``x / scale`` in FP32, rounded to nearest even, saturated.
    Where an element is NaN, the scale is and the codes are 0.

    Args:
        x_THD: BF16 or FP16.
        rotated: whether to ``rotate`` first, as of K.

    Returns:
        int8 ``[T, H, D]`` and FP32 ``[T, H]``.
    """
    return encode(rotate(x_THD) if rotated else x_THD.float())


def encode(x_THD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``token_codes`` of what is rotated already, FP32."""
    amax_TH = x_THD.abs().amax(-1)
    # by a tensor: CUDA divides by a number as a product with its inverse, an ulp apart
    least_TH = amax_TH / torch.full_like(amax_TH, LARGEST_CODE)
    bits_TH = least_TH.clamp(LEAST_SCALE, LARGEST_SCALE).view(torch.int32)
    scale_TH = ((bits_TH + 0xFFFFF) & ~0xFFFFF).view(torch.float32)  # 3 bits after the first stay
    scale_TH = scale_TH.masked_fill(amax_TH.isnan(), torch.nan)
    codes_THD = (x_THD / scale_TH[..., None]).clamp(-LARGEST_CODE, LARGEST_CODE).round()
    return codes_THD.nan_to_num(0).to(torch.int8), scale_TH
