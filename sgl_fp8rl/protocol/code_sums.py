"""Sums over the bits of quantized weights, by which a trainer and an engine compare theirs."""

import torch

Sums = dict[str, list[int]]
"""By HF tensor: the sum of its codes, and that of its scales."""
_MODULUS = 1 << 64


def code_sum(codes: torch.Tensor) -> torch.Tensor:
    """The sum of codes as 64-bit words, on their device; whole blocks of any box of a tensor.

    Words that change places within a tensor keep it.
    """
    return codes.contiguous().view(-1).view(torch.int64).sum(dtype=torch.int64)


def scale_sum(scales: torch.Tensor) -> torch.Tensor:
    """The sum of FP32 scales as 32-bit words, on their device."""
    return scales.contiguous().view(-1).view(torch.int32).sum(dtype=torch.int64)


def total(sums: list[int]) -> int:
    """The sum of a tensor, from those of its boxes."""
    return sum(sums) % _MODULUS
