"""The GEMM of one block-FP8 linear layer, on codes that the producer of its input may have made.

SGLang's DeepGEMM computes it, the fastest kernel at 24 rows and more on an H200 with DeepGEMM 0.2.3
(docs/performance_evidence.md, "GEMMs"); below that FlashInfer's is (``--fp8-gemm-backend
flashinfer_deepgemm``, where SGLang quantizes each input itself).

Shape suffixes as in ``ops.reference``.
"""

from collections.abc import Callable
from typing import Any

import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.ops.activation import Channels, Quantized, attached
from sgl_fp8rl.ops.reference import BLOCK

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``kernel(codes_MK, scales_Mk, weight_NK, scales_nk)`` returns a new BF16 ``y_MN``; scales of
activations lie as ``Quantized`` has them, not by row."""


def fits_deep_gemm(n: int, k: int) -> bool:
    """Whether SGLang runs DeepGEMM for a weight [n, k], by its own conditions, or else Triton."""
    return n % 64 == 0 and k % BLOCK == 0


def deep_gemm(
    codes_MK: torch.Tensor,
    scales_Mk: torch.Tensor,
    weight_NK: torch.Tensor,
    scales_nk: torch.Tensor,
) -> torch.Tensor:
    """DeepGEMM, as SGLang calls it on Hopper."""
    y_MN = codes_MK.new_empty((codes_MK.shape[0], weight_NK.shape[0]), dtype=torch.bfloat16)
    compat.deep_gemm_nt((codes_MK, scales_Mk), (weight_NK, scales_nk), y_MN)
    return y_MN


def triton(
    codes_MK: torch.Tensor,
    scales_Mk: torch.Tensor,
    weight_NK: torch.Tensor,
    scales_nk: torch.Tensor,
) -> torch.Tensor:
    """SGLang's Triton kernel, on any GPU, with SGLang's own config for the shape."""
    y_MN: torch.Tensor = compat.triton_block_fp8_matmul(
        codes_MK, weight_NK, scales_Mk, scales_nk, [BLOCK, BLOCK], output_dtype=torch.bfloat16
    )
    return y_MN


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
    kernel: Kernel,
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
    if len(x_MK) == 0:  # an idle rank's batch
        return x.new_empty((*x.shape[:-1], n))
    codes_MK, scales_Mk = quantized(x, x_MK, within=within, power_of_two=power_of_two)
    y_MN = kernel(codes_MK, scales_Mk, weight_NK, layer.weight_scale_inv)
    if bias is not None:
        y_MN += bias
    return y_MN.view(*x.shape[:-1], n)
