"""The factors that attention kernels need, derived from the scales on the device for all layers.

What one kernel takes alone is a function here that the row of its backend in ``backends.py`` names.
It returns ``[n, L, ...]``: n tensors for each layer.

Shape suffixes: L layers, 3 the rows K, V and Q, H the model's KV heads, h those of this rank.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sgl_fp8rl.protocol.kv_schema import KV_SCALE_ROWS

K, V, Q = range(len(KV_SCALE_ROWS))
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class KernelScales:
    """The scales of this rank's heads, and what several kernels take."""

    scales_L3h: torch.Tensor
    """Contiguous, equal for all heads of a layer."""
    top_L3: torch.Tensor
    query_L: torch.Tensor
    """What q is divided by before it is cast to E4M3, a power of two, so that the division is
    exact. It is Q's scale if that exceeds 1: |q| up to 448 fits E4M3 unscaled."""

    @classmethod
    def of(cls, scales_L3h: torch.Tensor) -> "KernelScales":
        """Derive from scales that are equal for all heads of a layer."""
        scales_L3h = scales_L3h.contiguous()
        top_L3 = scales_L3h.amax(-1)
        query_L = power_of_two_above(top_L3[:, Q].clamp_min(1.0).contiguous())
        return cls(scales_L3h, top_L3, query_L)

    @property
    def store_2Lh(self) -> torch.Tensor:
        """K and V scale: the store divides by them, and torch_native and FlashInfer FA2 need q and
        out multiplied by them."""
        return torch.stack([self.scales_L3h[:, K], self.scales_L3h[:, V]])

    @property
    def q_factor_1Lh(self) -> torch.Tensor:
        """The factor of q before a kernel that takes it in E4M3: the inverse of ``query_L``."""
        return (1 / self.query_L.unsqueeze(-1)).repeat(1, self.scales_L3h.shape[-1]).unsqueeze(0)


Derive = Callable[[KernelScales], torch.Tensor]


def power_of_two_above(x: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below x; x FP32, normal and positive."""
    mantissa = (1 << 23) - 1
    return ((x.view(torch.int32) + mantissa) & ~mantissa).view(torch.float32)


def fa3_k_descale(given: KernelScales) -> torch.Tensor:
    """``k_descale`` of FA3: K's scale over the factor of q. ``v_descale`` is V's scale."""
    k_descale_Lh = given.scales_L3h[:, K] * given.query_L.unsqueeze(-1)
    return k_descale_Lh.clamp_max(_LARGEST).unsqueeze(0)
