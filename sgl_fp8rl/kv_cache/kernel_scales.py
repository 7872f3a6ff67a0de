"""The factors that attention kernels need, derived from the scales on the device for all layers.

Shape suffixes: L layers, 3 the rows K, V and Q, H the model's KV heads, h those of this rank.
"""

from dataclasses import dataclass

import torch

from sgl_fp8rl.protocol.kv_schema import KV_SCALE_ROWS

K, V, Q = range(len(KV_SCALE_ROWS))
MAX_OCTAVES = (4, 24, 4)
"""How far a head's K, V and Q scale may be below its layer's, in powers of two. V's ratio
multiplies out. K's multiplies q before XQA rounds q to E4M3, where a small q would underflow: the
error of q . k is 3.7% up to 2^-4, 4.6% at 2^-6 and 57% at 2^-10 (simulated, normal q and k)."""


@dataclass(frozen=True)
class KernelScales:
    """The factors for the KV heads of this rank (h) of each layer (L)."""

    store_2Lh: torch.Tensor
    """K and V scale: the store divides by them, and torch_native and FlashInfer FA2 need q and out
    multiplied by them."""
    xqa_2L: torch.Tensor
    """``q_scale`` and ``kv_scale`` of ``flashinfer.xqa.xqa``, which multiplies q . k by both and by
    1 / sqrt(head dim), and out by the second."""
    ratio_2Lh: torch.Tensor
    """Remaining factors of q and out around XQA: powers of two, so multiplication is exact."""


def as_kept(scales_L3H: torch.Tensor, per_head: bool) -> torch.Tensor:
    """Scales as the cache stores them: a layer's is that of its largest head; a head's is the
    layer's times the smallest power of two that is not below the head's own."""
    layer = scales_L3H.amax(-1, keepdim=True)
    if not per_head:
        return layer.expand_as(scales_L3H)
    rows = (scales_L3H / layer).unbind(-2)
    ratios = [row.clamp_min(2.0**-least) for row, least in zip(rows, MAX_OCTAVES, strict=True)]
    return layer * power_of_two_above(torch.stack(ratios, -2))


def power_of_two_above(x: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below x; x FP32, normal and positive."""
    mantissa = (1 << 23) - 1
    return ((x.view(torch.int32) + mantissa) & ~mantissa).view(torch.float32)


def derive(scales_L3h: torch.Tensor, softmax_L: torch.Tensor) -> KernelScales:
    """Derive the factors from the scales of this rank's heads.

    XQA takes one K, V and Q scale for all heads, and casts q to E4M3 itself. So K and V get the
    largest head's scale, and q and out the heads' ratios to it. q is divided by its scale first if
    that exceeds 1, as a power of two: |q| up to 448 fits E4M3 unscaled.
    """
    scales_L3h = scales_L3h.contiguous()
    top_L3 = scales_L3h.amax(-1)
    query_L = power_of_two_above(top_L3[:, Q].clamp_min(1.0).contiguous())
    largest = torch.finfo(torch.float32).max
    q_scale_L = (top_L3[:, K] / top_L3[:, V] * query_L * softmax_L).clamp_max(largest)
    ratio_L3h = scales_L3h / top_L3.unsqueeze(-1)
    return KernelScales(
        torch.stack([scales_L3h[:, K], scales_L3h[:, V]]),
        torch.stack([q_scale_L, top_L3[:, V]]),
        torch.stack([ratio_L3h[:, K] / query_L.unsqueeze(-1), ratio_L3h[:, V]]),
    )
