"""The quantization error of K and V, measured on prefills when a report is requested.

Decode and other prefills never run this. Stored values are read back from the cache, so the error
includes every step between K and what decode reads.
Shape suffixes: T tokens, H KV heads, D head dim, S slots.
"""

import torch

from sgl_fp8rl.kv_cache.scales import ERRORS, KVScales, LayerKV
from sgl_fp8rl.ops.kv import PADDING_SLOT
from sgl_fp8rl.ops.reference import FP8_DTYPE

TOKENS = 4096
"""How many tokens of each layer a request measures; one prefill may have fewer."""


def start(scales: KVScales) -> int:
    """Measure the next ``TOKENS`` prefilled tokens too, until the scales change."""
    if scales.errors is None:
        device = scales.scales.device
        scales.errors = torch.zeros(scales.layers, ERRORS, dtype=torch.float64, device=device)
    scales.to_observe = [TOKENS] * scales.layers
    return TOKENS


def observe(
    mine: LayerKV,
    k: torch.Tensor,
    v: torch.Tensor,
    slots_T: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Add the error of tokens that were just stored. No sync with the device.

    Args:
        k, v: after QK-norm and RoPE, [tokens, ...] with the heads of this rank.
        caches: of K and of V, [S, H, D].
    """
    left, errors_LC = mine.scales.to_observe, mine.scales.errors
    assert errors_LC is not None  # ``start`` made it
    count = min(left[mine.layer_index], len(slots_T))
    left[mine.layer_index] -= count
    slots_T = slots_T[:count]
    sums = [(slots_T != PADDING_SLOT).sum()]
    for x, cache_SHD, scale_H in zip((k, v), caches, (mine.k_scale_h, mine.v_scale_h), strict=True):
        x_THD = x.view(-1, *cache_SHD.shape[1:])[:count]
        sums += error_sums(x_THD, slots_T, cache_SHD, scale_H)
    errors_LC[mine.layer_index] += torch.stack([value.double() for value in sums])


def error_sums(
    x_THD: torch.Tensor, slots_T: torch.Tensor, cache_SHD: torch.Tensor, scale_H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums of (x - stored)^2 and of x^2 over finite elements, float64, and the number of NaN or Inf
    elements; without padding tokens."""
    # As bytes: not every torch version and device can index FP8.
    codes_THD = cache_SHD.view(torch.uint8)[slots_T].view(FP8_DTYPE)
    stored_THD = codes_THD.double() * scale_H.double()[:, None]
    counted = (slots_T != PADDING_SLOT)[:, None, None]
    finite = x_THD.isfinite()
    x_THD = x_THD.double()
    used = finite & counted
    error_THD = torch.where(used, x_THD - stored_THD, 0.0)
    return (
        error_THD.square().sum(),
        torch.where(used, x_THD, 0.0).square().sum(),
        (~finite & counted).sum(),
    )
