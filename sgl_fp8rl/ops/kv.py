"""Stores of 8-bit keys and values in plain torch: the reference for ``kv_triton.py``, and the
implementation of CPU engines.

Over E4M3 a value is ``code * scale``, one FP32 scale for each KV head. Writes saturate: not every
torch version and GPU does so in the cast, and one NaN in the cache spoils all tokens that attend to
it. INT8 is ``kv_int8.py``.

Shape suffixes: T tokens, H KV heads of this rank, D head dim, S slots, C statistics.
"""

from dataclasses import dataclass

import torch

from sgl_fp8rl.ops import kv_int8
from sgl_fp8rl.ops.expect import SIXTEEN_BITS, expect
from sgl_fp8rl.ops.paged_decode import Codes, pack_token_scales
from sgl_fp8rl.ops.reference import FP8_DTYPE, FP8_MAX

STATS = 5
"""Statistics of a layer, int64: tokens, clipped elements of K and of V, and the FP32 bits of the
largest finite |K| and |V| (as integers the magnitudes are in order)."""
PADDING_SLOT = 0
"""Where SGLang writes the padding tokens of a batch; they are stored but not counted."""

_INF = 0x7F800000


@dataclass(frozen=True, kw_only=True)
class Cache(Codes):
    """The caches of a layer, any strides over slots and heads, and their statistics."""

    stats_C: torch.Tensor
    """int64 ``[STATS]``, contiguous. An element is clipped if ``|x / scale| > 448``, over INT8 if
    it exceeds ``127 * LARGEST_SCALE``, of K after it was rotated: Inf is, NaN is not. Neither
    counts as largest magnitude, which is that before a rotation."""


def power_of_two_above(x: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below x; x FP32, normal and positive."""
    mantissa = (1 << 23) - 1
    return ((x.contiguous().view(torch.int32) + mantissa) & ~mantissa).view(torch.float32)


def kv_codes(x_THD: torch.Tensor, scale_H: torch.Tensor) -> torch.Tensor:
    """``x / scale`` in FP32, saturated and rounded to nearest even: float8_e4m3fn ``[T, H, D]``.

    NaN stays NaN (code 0x7F whatever its sign); Inf becomes 448.
    """
    return _encode(_divide(x_THD, scale_H))


def store_kv(
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    slots_T: torch.Tensor,
    cache: Cache,
    *,
    read_back: bool,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Write the codes of token ``t`` to slot ``slots_T[t]`` of both caches, and update statistics.

    Args:
        k_THD: BF16 or FP16, any strides over tokens and heads; V's head dim may differ.
        slots_T: int64; only ``PADDING_SLOT`` may be repeated.

    Returns:
        With ``read_back`` what decode will read of K and of V, exact: over E4M3 still divided by
        the scale, in their dtype; over INT8 FP16, K rotated.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    check_store(k_THD, v_THD, slots_T, cache)
    values, token_scales = [], []
    sides = (k_THD, cache.k_SHD, cache.k_scale_H), (v_THD, cache.v_SHD, cache.v_scale_H)
    for side, (x_THD, cache_SHD, scale_H) in enumerate(sides):
        if scale_H is None:
            stored_THD = kv_int8.rotate(x_THD) if side == 0 else x_THD.float()
            codes_THD, scale_TH = kv_int8.encode(stored_THD)
            clipped_THD = stored_THD.abs() > kv_int8.LARGEST_CODE * kv_int8.LARGEST_SCALE
            token_scales.append(scale_TH)
            values.append((codes_THD * scale_TH[..., None]).half())
        else:
            scaled_THD = _divide(x_THD, scale_H)
            codes_THD, clipped_THD = _encode(scaled_THD), scaled_THD.abs() > FP8_MAX
            values.append(codes_THD.to(x_THD.dtype))
        # As bytes: not every torch version and device can index FP8.
        cache_SHD.view(torch.uint8)[slots_T] = codes_THD.view(torch.uint8)
        _count(x_THD, clipped_THD, slots_T, cache.stats_C, side)
    if cache.token_scales_HS is not None:
        cache.token_scales_HS[:, slots_T] = pack_token_scales(token_scales[0], token_scales[1])
    return (values[0], values[1]) if read_back else None


def check_store(
    k_THD: torch.Tensor, v_THD: torch.Tensor, slots_T: torch.Tensor, cache: Cache
) -> None:
    """Raise ValueError if the arguments of ``store_kv`` do not match."""
    expect("K", k_THD, SIXTEEN_BITS, ("tokens", "KV heads", "head dim"))
    T, H, D = k_THD.shape
    expect("V", v_THD, k_THD.dtype, (T, H, v_THD.shape[-1]))
    scales_HS, slots = cache.token_scales_HS, len(cache.k_SHD)
    codes = FP8_DTYPE if scales_HS is None else torch.int8
    expect("the K cache", cache.k_SHD, codes, (slots, H, D))
    expect("the V cache", cache.v_SHD, codes, (slots, H, v_THD.shape[-1]))
    expect("the slots", slots_T, torch.int64, (T,), dense=False)
    expect("the statistics", cache.stats_C, torch.int64, (STATS,))
    if scales_HS is not None:
        expect("the scales of tokens", scales_HS, torch.int32, (H, slots))
        return
    for name, scale_H in (("the K scales", cache.k_scale_H), ("the V scales", cache.v_scale_H)):
        assert scale_H is not None
        expect(name, scale_H, torch.float32, (H,), dense=False)


def _count(
    x_THD: torch.Tensor,
    clipped_THD: torch.Tensor,
    slots_T: torch.Tensor,
    stats_C: torch.Tensor,
    side: int,
) -> None:
    """Add the tokens of K (side 0) or V (1) to the statistics."""
    counted_T = slots_T != PADDING_SLOT
    counted = counted_T[:, None, None]
    if side == 0:
        stats_C[0] += counted_T.sum()
    stats_C[1 + side] += (clipped_THD & counted).sum()
    if x_THD.numel():
        bits = x_THD.float().abs().view(torch.int32)
        top = torch.where((bits < _INF) & counted, bits, 0).max()
        stats_C[3 + side] = torch.maximum(stats_C[3 + side], top)


def _divide(x_THD: torch.Tensor, scale_H: torch.Tensor) -> torch.Tensor:
    return x_THD.float() / scale_H[:, None]


def _encode(scaled_THD: torch.Tensor) -> torch.Tensor:
    saturated = scaled_THD.clamp(-FP8_MAX, FP8_MAX)  # NaN passes
    # A single NaN: a GPU's cast drops its sign, torch's keeps it.
    return saturated.masked_fill(scaled_THD.isnan(), torch.nan).to(FP8_DTYPE)
