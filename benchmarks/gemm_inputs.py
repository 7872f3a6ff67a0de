"""Activations that GEMMs are measured on: normal, and with outliers like those of checkpoints."""

import torch

ROTATED_BYTES = 200 << 20
"""Bytes of rotating weights: four times the L2 cache of a Hopper GPU."""
CHECKED_ROWS = 64
OUTLIER_CHANNELS = 4
OUTLIER = 100.0
HOT_TOKENS = 3
HOT = 30.0


def random_activations(m: int, k: int, generator: torch.Generator) -> list[torch.Tensor]:
    """BF16 ``[M, K]``: normal values; and a few channels and tokens of them much larger."""
    device = generator.device
    normal_MK = torch.randn(m, k, generator=generator, device=device, dtype=torch.bfloat16)
    outlier_MK = normal_MK.clone()
    outlier_MK[:, :: max(1, k // OUTLIER_CHANNELS)] *= OUTLIER
    outlier_MK[:: max(1, m // HOT_TOKENS)] *= HOT
    return [normal_MK, outlier_MK]


def checked_rows(m: int) -> torch.Tensor:
    """Indices of the rows that are compared, evenly spread."""
    return torch.linspace(0, m - 1, min(m, CHECKED_ROWS), dtype=torch.float64).round().long()


def copies(weight_NK: torch.Tensor) -> int:
    """How many copies of this weight to rotate, so that none is read from the L2 cache."""
    return max(2, -(-ROTATED_BYTES // weight_NK.numel())) if weight_NK.is_cuda else 1
