"""The quantization error of K and V, measured on prefills when a report is requested.

Decode and other prefills never run this. Stored values are read back from the cache, so the error
includes every step between K and what decode reads.
Shape suffixes: T tokens, H KV heads, D head dim, S slots.
"""

import torch

from sgl_fp8rl.ops.kv import PADDING_SLOT
from sgl_fp8rl.receiver.kv.quantized import Caches, LayerKV, QuantizedKV

ERRORS = 7
"""Sums of a layer, float64: tokens; then for K and for V the squared errors, the squares, and the
number of NaN and Inf elements."""
TOKENS = 4096
"""How many tokens of each layer a request measures; one prefill may have fewer."""


def start(scales: QuantizedKV) -> int:
    """Measure the next ``TOKENS`` prefilled tokens too, until the scales change."""
    if scales.errors is None:
        device = scales.statistics.device
        scales.errors = torch.zeros(scales.layers, ERRORS, dtype=torch.float64, device=device)
    scales.to_observe = [TOKENS] * scales.layers
    return TOKENS


def observe(
    mine: LayerKV, k: torch.Tensor, v: torch.Tensor, slots_T: torch.Tensor, caches: Caches
) -> None:
    """Add the error of tokens that were just stored. No sync with the device.

    Args:
        k, v: after QK-norm and RoPE, [tokens, ...] with the heads of this rank.
    """
    left, errors_LC = mine.scales.to_observe, mine.scales.errors
    assert errors_LC is not None  # ``start`` made it
    count = min(left[mine.layer_index], len(slots_T))
    left[mine.layer_index] -= count
    slots_T = slots_T[:count]
    k_THD, v_THD = (x.view(-1, *c.shape[1:])[:count] for x, c in zip((k, v), caches, strict=True))
    wanted_k, stored_k, stored_v = mine.stored(k_THD, slots_T, caches)
    counted_T = slots_T != PADDING_SLOT
    sums = [
        counted_T.sum(),
        *error_sums(wanted_k, stored_k, counted_T),
        *error_sums(v_THD.double(), stored_v, counted_T),
    ]
    errors_LC[mine.layer_index] += torch.stack([value.double() for value in sums])


def error_sums(
    x_THD: torch.Tensor, stored_THD: torch.Tensor, counted_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums of (x - stored)^2 and of x^2 over finite elements, float64, and the number of NaN or Inf
    elements, of the tokens that count."""
    counted = counted_T[:, None, None]
    finite = x_THD.isfinite()
    used = finite & counted
    error_THD = torch.where(used, x_THD - stored_THD, 0.0)
    return (
        error_THD.square().sum(),
        torch.where(used, x_THD, 0.0).square().sum(),
        (~finite & counted).sum(),
    )
