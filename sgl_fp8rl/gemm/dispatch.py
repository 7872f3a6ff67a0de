"""The product of one FP8 linear layer: which kernel runs for the rows of this batch.

What a layer may run is made once, at start (``startup``); a call looks M up among the bounds.
So a captured CUDA graph and an eager call with as many rows run the same kernel.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sgl_fp8rl.gemm.candidates import CANDIDATES, STOCK, Kernel
from sgl_fp8rl.gemm.table import Entry
from sgl_fp8rl.ops.activation import Quantized, attached


@dataclass(frozen=True)
class Choices:
    """Kernels by the rows of a batch."""

    bounds: tuple[int, ...]
    """Ascending; the kernel of the same index runs up to and with this M."""
    kernels: tuple[Kernel, ...]
    """One more than there are bounds: the last runs above them all."""

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> "Choices":
        """Bind the entries of one shape; above them the stock choice runs."""
        stock = CANDIDATES[STOCK].bind({})
        kernels = (CANDIDATES[entry.kernel].bind(entry.config) for entry in entries)
        return cls(tuple(entry.m for entry in entries), (*kernels, stock))

    def kernel(self, m: int) -> Kernel:
        """The kernel for a batch of ``m`` rows."""
        return self.kernels[bisect_left(self.bounds, m)]


def quantized(x: torch.Tensor, x_MK: torch.Tensor, *, by_row: bool = False) -> Quantized:
    """Codes and scales of ``x``, which is ``x_MK`` too: those its producer attached, if they fit.

    Anything that makes a new tensor of ``x`` loses them, and they are made here.

    Args:
        by_row: how the scales are to lie (``Quantized``).
    """
    ready = attached(x)
    if ready is not None and (ready.codes_MK.shape, ready.is_by_row) == (x_MK.shape, by_row):
        return ready
    from sgl_fp8rl.ops.activation_triton import quantize_tokens  # Triton, and a GPU

    return quantize_tokens(x_MK, by_row=by_row)


def linear(
    choices: Choices, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``x @ weight.T + bias`` of a block-FP8 ``layer``: BF16 ``[..., K]`` to ``[..., N]``."""
    weight_NK = layer.weight
    n, k = weight_NK.shape
    x_MK = x.view(-1, k)
    m = x_MK.shape[0]
    if m == 0:  # an idle rank's batch
        return x.new_empty((*x.shape[:-1], n))
    codes_MK, scales_Mk = quantized(x, x_MK)
    y_MN = choices.kernel(m)(codes_MK, scales_Mk, weight_NK, layer.weight_scale_inv)
    if bias is not None:
        y_MN += bias
    return y_MN.view(*x.shape[:-1], n)
