"""FP8 keys and values in plain torch: the reference for ``kv_triton.py``, and the implementation
of CPU engines.

A value is ``code * scale``, one FP32 scale for each KV head. Writes saturate: not every torch
version and GPU does so in the cast, and one NaN in the cache spoils all tokens that attend to it.

Shape suffixes: T tokens, H KV heads of this rank, D head dim, S slots, C statistics.
"""

import torch

from sgl_fp8rl.ops.reference import FP8_DTYPE, FP8_MAX

STATS = 5
"""Statistics of a layer, int64: tokens, clipped elements of K and of V, and the FP32 bits of the
largest finite |K| and |V| (as integers the magnitudes are in order)."""
PADDING_SLOT = 0
"""Where SGLang writes the padding tokens of a batch; they are stored but not counted."""

_INF = 0x7F800000


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
    k_cache_SHD: torch.Tensor,
    v_cache_SHD: torch.Tensor,
    k_scale_H: torch.Tensor,
    v_scale_H: torch.Tensor,
    stats_C: torch.Tensor,
    *,
    read_back: bool,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Write the codes of token ``t`` to slot ``slots_T[t]`` of both caches, and update statistics.

    Args:
        k_THD: BF16 or FP16, any strides over tokens and heads; V's head dim may differ.
        slots_T: int64; only ``PADDING_SLOT`` may be repeated.
        k_cache_SHD: float8_e4m3fn, any strides over slots and heads.
        k_scale_H: FP32, above zero, read on the device.
        stats_C: int64 ``[STATS]``, contiguous, updated in place. An element is clipped if
            ``|x / scale| > 448``: Inf is, NaN is not, and neither counts as largest magnitude.

    Returns:
        With ``read_back`` the codes of K and of V as values of their dtype (exact): what decode
        will read, still divided by the scale.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    check_store(k_THD, v_THD, slots_T, k_cache_SHD, v_cache_SHD, stats_C)
    check_scales(k_scale_H, v_scale_H, k_THD.shape[1])
    values = []
    for side, (x_THD, cache_SHD, scale_H) in enumerate(
        ((k_THD, k_cache_SHD, k_scale_H), (v_THD, v_cache_SHD, v_scale_H))
    ):
        scaled = _divide(x_THD, scale_H)
        codes = _encode(scaled)
        # As bytes: not every torch version and device can index FP8.
        cache_SHD.view(torch.uint8)[slots_T] = codes.view(torch.uint8)
        count(x_THD, scaled.abs() > FP8_MAX, slots_T, stats_C, side)
        if read_back:
            values.append(codes.to(x_THD.dtype))
    return (values[0], values[1]) if read_back else None


def count(
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


def check_store(
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    slots_T: torch.Tensor,
    k_cache_SHD: torch.Tensor,
    v_cache_SHD: torch.Tensor,
    stats_C: torch.Tensor,
    codes: torch.dtype = FP8_DTYPE,
) -> None:
    """Raise ValueError if the arguments of ``store_kv`` but for the scales do not match.

    Args:
        codes: what the caches hold.
    """
    for name, x_THD, cache_SHD in (("K", k_THD, k_cache_SHD), ("V", v_THD, v_cache_SHD)):
        if x_THD.dtype not in (torch.bfloat16, torch.float16) or x_THD.dim() != 3:
            raise ValueError(
                f"{name} is {x_THD.dtype} of shape {list(x_THD.shape)}; "
                f"pass BF16 or FP16 [tokens, KV heads, head dim]"
            )
        if cache_SHD.dtype != codes or cache_SHD.shape[1:] != x_THD.shape[1:]:
            raise ValueError(
                f"the {name} cache is {cache_SHD.dtype} of shape {list(cache_SHD.shape)}; pass "
                f"{str(codes)[6:]} [slots, {x_THD.shape[1]}, {x_THD.shape[2]}], like {name}"
            )
        if x_THD.stride(2) != 1 or cache_SHD.stride(2) != 1:
            raise ValueError(
                f"heads of {name} or of its cache are not contiguous (strides "
                f"{x_THD.stride()} and {cache_SHD.stride()}); pass views whose last stride is 1"
            )
    if k_THD.shape[:2] != v_THD.shape[:2] or k_THD.dtype != v_THD.dtype:
        raise ValueError(
            f"K is {k_THD.dtype} {list(k_THD.shape)} and V {v_THD.dtype} {list(v_THD.shape)}; "
            f"pass both with the same dtype, tokens and KV heads"
        )
    if slots_T.dtype != torch.int64 or slots_T.shape != k_THD.shape[:1]:
        raise ValueError(
            f"the slots are {slots_T.dtype} of shape {list(slots_T.shape)}; "
            f"pass int64, one for each of {k_THD.shape[0]} tokens"
        )
    if stats_C.dtype != torch.int64 or stats_C.shape != (STATS,) or not stats_C.is_contiguous():
        raise ValueError(
            f"the statistics are {stats_C.dtype} of shape {list(stats_C.shape)}; "
            f"pass {STATS} contiguous int64"
        )


def check_scales(k_scale_H: torch.Tensor, v_scale_H: torch.Tensor, heads: int) -> None:
    """Raise ValueError unless these are E4M3 scales, one for each KV head."""
    for name, scale_H in (("K", k_scale_H), ("V", v_scale_H)):
        if scale_H.dtype != torch.float32 or scale_H.shape != (heads,):
            raise ValueError(
                f"the {name} scales are {scale_H.dtype} of shape {list(scale_H.shape)}; "
                f"pass FP32, one for each of {heads} KV heads"
            )


def _divide(x_THD: torch.Tensor, scale_H: torch.Tensor) -> torch.Tensor:
    return x_THD.float() / scale_H[:, None]


def _encode(scaled_THD: torch.Tensor) -> torch.Tensor:
    saturated = scaled_THD.clamp(-FP8_MAX, FP8_MAX)  # NaN passes
    # A single NaN: a GPU's cast drops its sign, torch's keeps it.
    return saturated.masked_fill(scaled_THD.isnan(), torch.nan).to(FP8_DTYPE)
