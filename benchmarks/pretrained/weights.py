"""What the 4-bit grid of the source does to the error of FP8 weights, and how large outliers are.

Beside the weights stands what they would be off their grid: with noise of one step of it added.
"""

from pathlib import Path
from statistics import median

import torch
from safetensors.torch import load_file

from sgl_fp8rl.ops.reference import dequantize_weight, quantize_weight

GROUP, STEPS = 32, 15
"""Weights of a row that share a grid, and the steps of it."""
EVERY = 11
"""One matrix in so many is looked at: some of each kind and depth."""


def look(checkpoint: Path) -> dict[str, float]:
    """Medians over matrices."""
    named = load_file(checkpoint / "model.safetensors")
    names = sorted(name for name in named if "_proj" in name)[::EVERY]
    matrices = [named[name].float() for name in names]
    drawn = torch.Generator().manual_seed(0)
    noise = [torch.rand(weight.shape, generator=drawn) - 0.5 for weight in matrices]
    off_grid = [w + step_of(w) * n for w, n in zip(matrices, noise, strict=True)]
    normal = [torch.randn(weight.shape, generator=drawn) for weight in matrices]
    return {
        "matrices": len(matrices),
        "fp8_error": median(map(fp8_error, matrices)),
        "fp8_error_off_grid": median(map(fp8_error, off_grid)),
        "fp8_error_gaussian": median(map(fp8_error, normal)),
        "peak": median(map(peak, matrices)),
        "largest_peak": max(map(peak, matrices)),
        "peak_gaussian": median(map(peak, normal)),
    }


def step_of(weight: torch.Tensor) -> torch.Tensor:
    """The step of each weight's grid, of the same shape."""
    groups = weight.unflatten(1, (-1, GROUP))
    step: torch.Tensor = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / STEPS
    return step.expand_as(groups).flatten(1)


def fp8_error(weight: torch.Tensor) -> float:
    """RMS of what block FP8 adds, over the RMS of the weights."""
    error = dequantize_weight(*quantize_weight(weight)) - weight
    return (error.square().mean() / weight.square().mean()).sqrt().item()


def peak(weight: torch.Tensor) -> float:
    """The largest magnitude over the RMS."""
    return (weight.abs().amax() / weight.square().mean().sqrt()).item()
