"""The GEMM of one FP8 linear layer: select the kernel by the number of rows.

A layer's kernels are set once, at start (``startup``); a call looks up M. So a captured CUDA graph
and an eager call with the same number of rows run the same kernel.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from sgl_fp8rl.engine.gemm.candidates import CANDIDATES, STOCK, Kernel
from sgl_fp8rl.engine.gemm.table import Entry
from sgl_fp8rl.ops.activation import Channels, Quantized, attached


@dataclass(frozen=True)
class Choices:
    """Kernels by number of rows."""

    bounds: tuple[int, ...]
    """Ascending; the kernel at the same index runs up to this M, inclusive."""
    kernels: tuple[Kernel, ...]
    """One more than the bounds: the last runs above them."""

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> "Choices":
        """Bind the entries of one shape; the stock choice runs above them."""
        stock = CANDIDATES[STOCK].bind({})
        kernels = (CANDIDATES[entry.kernel].bind(entry.config) for entry in entries)
        return cls(tuple(entry.m for entry in entries), (*kernels, stock))

    @classmethod
    @cache
    def untuned(cls) -> "Choices":
        """Triton's kernel at any number of rows and on any GPU."""
        return cls((), (CANDIDATES["triton"].bind({}),))

    def kernel(self, m: int) -> Kernel:
        """The kernel for a batch of ``m`` rows."""
        return self.kernels[bisect_left(self.bounds, m)]


def quantized(
    x: torch.Tensor,
    x_MK: torch.Tensor,
    *,
    by_row: bool = False,
    within: Channels | None = None,
    power_of_two: bool = False,
) -> Quantized:
    """Codes and scales of ``x`` (``x_MK`` is a view of it): those that its producer attached.

    If they are missing, since ``x`` is a new tensor, or do not match, quantize ``x_MK`` here.

    Args:
        by_row: layout of the scales (``Quantized``).
        within: where the channels lie among zeros.
        power_of_two: round scales up to powers of two, as producers do for this layer.
    """
    ready = attached(x, within)
    shape = x_MK.shape if within is None else (len(x_MK), within.size)
    if ready is not None and (ready.codes_MK.shape, ready.is_by_row) == (shape, by_row):
        return ready
    from sgl_fp8rl.ops.activation_triton import quantize_tokens  # Triton, and a GPU

    return quantize_tokens(x_MK, by_row=by_row, within=within, power_of_two=power_of_two)


def linear(
    choices: Choices,
    layer: Any,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    within: Channels | None = None,
    *,
    power_of_two: bool = False,
) -> torch.Tensor:
    """``x @ weight.T + bias`` of a block-FP8 ``layer``: BF16 ``[..., K]`` to ``[..., N]``.

    Args:
        within: where the columns lie in the storage of the weight, if they are padded.
        power_of_two: the scales of activations are powers of two.
    """
    weight_NK = layer.weight
    n = weight_NK.shape[0]
    x_MK = x.view(-1, x.shape[-1])
    m = x_MK.shape[0]
    if m == 0:  # an idle rank's batch
        return x.new_empty((*x.shape[:-1], n))
    codes_MK, scales_Mk = quantized(x, x_MK, within=within, power_of_two=power_of_two)
    y_MN = choices.kernel(m)(codes_MK, scales_Mk, weight_NK, layer.weight_scale_inv)
    if bias is not None:
        y_MN += bias
    return y_MN.view(*x.shape[:-1], n)
