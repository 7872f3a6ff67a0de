"""The factors that attention kernels need, derived from the scales on the device for all layers.

Shape suffixes: L layers, 3 the rows K, V and Q, H the model's KV heads, h those of this rank.
"""

from dataclasses import dataclass

import torch

from sgl_fp8rl.protocol.kv_schema import KV_SCALE_ROWS

K, V, Q = range(len(KV_SCALE_ROWS))


@dataclass(frozen=True)
class KernelScales:
    """The factors for the KV heads of this rank (h) of each layer (L)."""

    store_2Lh: torch.Tensor
    """K and V scale: the store divides by them, and torch_native and FlashInfer FA2 need q and out
    multiplied by them."""
    xqa_2L: torch.Tensor
    """``q_scale`` and ``kv_scale`` of ``flashinfer.xqa.xqa``, which multiplies q . k by both and by
    1 / sqrt(head dim), and out by the second."""
    q_factor_Lh: torch.Tensor
    """The remaining factor of q before XQA, a power of two, so multiplication is exact. FA3 takes
    codes of q times it."""
    fa3_k_Lh: torch.Tensor
    """``k_descale`` of FA3: K's scale over that factor. ``v_descale`` is V's scale."""


def power_of_two_above(x: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below x; x FP32, normal and positive."""
    mantissa = (1 << 23) - 1
    return ((x.view(torch.int32) + mantissa) & ~mantissa).view(torch.float32)


def derive(scales_L3h: torch.Tensor, softmax_L: torch.Tensor) -> KernelScales:
    """Derive the factors from the scales of this rank's heads.

    XQA takes one K, V and Q scale for all heads, and casts q to E4M3 itself. q is divided by its
    scale first if that exceeds 1, as a power of two: |q| up to 448 fits E4M3 unscaled.

    Args:
        scales_L3h: equal for all heads of a layer.
    """
    scales_L3h = scales_L3h.contiguous()
    top_L3 = scales_L3h.amax(-1)
    query_L = power_of_two_above(top_L3[:, Q].clamp_min(1.0).contiguous())
    query_L1 = query_L.unsqueeze(-1)
    largest = torch.finfo(torch.float32).max
    q_scale_L = (top_L3[:, K] / top_L3[:, V] * query_L * softmax_L).clamp_max(largest)
    return KernelScales(
        torch.stack([scales_L3h[:, K], scales_L3h[:, V]]),
        torch.stack([q_scale_L, top_L3[:, V]]),
        (1 / query_L1).repeat(1, scales_L3h.shape[-1]),
        (scales_L3h[:, K] * query_L1).clamp_max(largest),
    )
