"""INT8 keys and values in plain torch: the reference for ``kv_int8_triton.py``, and the
implementation of CPU engines.

A value is ``code * scale``, one scale for each token and KV head. K is rotated first, after RoPE,
which spreads channels that are larger than others over all of a block. A query that is rotated
alike has the same product with it; V is not rotated.

Shape suffixes: T tokens, H heads (of K and V those of this rank), D head dim, S slots, C
statistics.
"""

import math

import torch

from sgl_fp8rl.ops.kv import check_store, count
from sgl_fp8rl.ops.paged_decode import pack_token_scales

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
    return _encode(rotate(x_THD) if rotated else x_THD.float())


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
    """Write the codes of token ``t`` to slot ``slots_T[t]`` of both caches, and update statistics.

    Args:
        k_THD: BF16 or FP16, any strides over tokens and heads; V's head dim may differ.
        slots_T: int64; only ``kv.PADDING_SLOT`` may be repeated.
        k_cache_SHD: int8, any strides over slots and heads.
        token_scales_HS: int32, any stride over heads, of ``pack_token_scales``.
        stats_C: int64 ``[kv.STATS]``, contiguous, updated in place. An element is clipped if it
            exceeds ``127 * LARGEST_SCALE``, of K after it was rotated; the largest magnitude of K
            is that before.

    Returns:
        With ``read_back`` the values of K, rotated, and of V, that decode will read: FP16, exact.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    check_store_int8(k_THD, v_THD, slots_T, k_cache_SHD, v_cache_SHD, token_scales_HS, stats_C)
    scales, values = [], []
    for side, (x_THD, cache_SHD) in enumerate(((k_THD, k_cache_SHD), (v_THD, v_cache_SHD))):
        stored_THD = rotate(x_THD) if side == 0 else x_THD.float()
        codes_THD, scale_TH = _encode(stored_THD)
        cache_SHD[slots_T] = codes_THD
        scales.append(scale_TH)
        clipped_THD = stored_THD.abs() > LARGEST_CODE * LARGEST_SCALE
        count(x_THD, clipped_THD, slots_T, stats_C, side)
        if read_back:
            values.append((codes_THD * scale_TH[..., None]).half())
    token_scales_HS[:, slots_T] = pack_token_scales(scales[0], scales[1])
    return (values[0], values[1]) if read_back else None


def check_store_int8(
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    slots_T: torch.Tensor,
    k_cache_SHD: torch.Tensor,
    v_cache_SHD: torch.Tensor,
    token_scales_HS: torch.Tensor,
    stats_C: torch.Tensor,
) -> None:
    """Raise ValueError if the arguments of ``store_kv_int8`` do not match."""
    check_store(k_THD, v_THD, slots_T, k_cache_SHD, v_cache_SHD, stats_C, torch.int8)
    shape = k_cache_SHD.shape[1], k_cache_SHD.shape[0]
    scales = token_scales_HS
    if scales.dtype != torch.int32 or scales.shape != shape or scales.stride(1) != 1:
        raise ValueError(
            f"the scales of tokens are {scales.dtype} of shape {list(scales.shape)} and strides "
            f"{scales.stride()}; pass int32 {list(shape)} with last stride 1"
        )


def _encode(x_THD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    amax_TH = x_THD.abs().amax(-1)
    # by a tensor: CUDA divides by a number as a product with its inverse, an ulp apart
    least_TH = amax_TH / torch.full_like(amax_TH, LARGEST_CODE)
    bits_TH = least_TH.clamp(LEAST_SCALE, LARGEST_SCALE).view(torch.int32)
    scale_TH = ((bits_TH + 0xFFFFF) & ~0xFFFFF).view(torch.float32)  # 3 bits after the first stay
    scale_TH = scale_TH.masked_fill(amax_TH.isnan(), torch.nan)
    codes_THD = (x_THD / scale_TH[..., None]).clamp(-LARGEST_CODE, LARGEST_CODE).round()
    return codes_THD.nan_to_num(0).to(torch.int8), scale_TH
