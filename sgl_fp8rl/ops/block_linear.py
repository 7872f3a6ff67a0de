"""Block-FP8 linears of a trainer, and their input gradients; SGLang is never imported.

On a Hopper GPU by DeepGEMM where it is installed, the kernel that SGLang runs there too, otherwise
by torch's block-scaled product, with the activation codes that the engine makes. Elsewhere, and
for activations that are not BF16, by the reference implementation, which is also the engine's on a
CPU.

Shape suffixes: M tokens, N output features, K input features, E experts; R rows sorted by expert, P
the same with each expert padded to whole blocks; m, n, k = M, N, K in blocks of 128.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F

from sgl_fp8rl.ops.activation import ALIGNMENT, Quantized
from sgl_fp8rl.ops.reference import BLOCK, fp8_linear

Product = Literal["deep_gemm", "torch", "reference"]
HOPPER = (9, 0)
"""The only GPUs whose block-scaled products take FP32 scales."""


def linear(
    x_MK: torch.Tensor,
    codes_NK: torch.Tensor,
    scale_inv_nk: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    power_of_two: bool = False,
) -> torch.Tensor:
    """``x @ weight.T + bias``: ``[M, N]`` in the dtype of x.

    Args:
        x_MK: contiguous.
        codes_NK: N and K are whole blocks.
        power_of_two: round the scales of activations up to powers of two.

    Raises:
        ValueError: an activation is NaN or Inf, where the reference computes.
    """
    product = product_of(x_MK)
    if not len(x_MK):
        return x_MK.new_empty((0, len(codes_NK)))
    if product == "reference":
        if not bool(x_MK.isfinite().all()):
            raise ValueError("FP8 quantization met NaN or Inf in activations; check the inputs")
        return fp8_linear(x_MK, codes_NK, scale_inv_nk, bias_N, power_of_two=power_of_two)
    multiply = _by_deep_gemm if product == "deep_gemm" else _by_torch
    y_MN = multiply(_codes_of(x_MK, power_of_two=power_of_two), codes_NK, scale_inv_nk)
    return y_MN if bias_N is None else y_MN.add_(bias_N)


def linear_by_expert(
    x_RK: torch.Tensor,
    counts_E: Sequence[int],
    codes_ENK: torch.Tensor,
    scale_inv_Enk: torch.Tensor,
    *,
    power_of_two: bool = False,
) -> torch.Tensor:
    """``linear`` of each expert's rows: ``[R, N]``.

    Args:
        counts_E: rows of each expert; they are R together.
    """
    if product_of(x_RK) == "deep_gemm" and len(x_RK):
        return _grouped(x_RK, counts_E, codes_ENK, scale_inv_Enk, power_of_two)
    parts = zip(x_RK.split(list(counts_E)), codes_ENK, scale_inv_Enk, strict=True)
    return torch.cat([linear(*part, power_of_two=power_of_two) for part in parts])


def input_gradient(
    dy_MN: torch.Tensor, codes_NK: torch.Tensor, scale_inv_nk: torch.Tensor
) -> torch.Tensor:
    """``dy @ weight`` with the weight that the codes stand for, in the dtype of dy: ``[M, K]``."""
    return dy_MN @ _dequantized(codes_NK, scale_inv_nk, dy_MN.dtype)


def input_gradient_by_expert(
    dy_RN: torch.Tensor,
    counts_E: Sequence[int],
    codes_ENK: torch.Tensor,
    scale_inv_Enk: torch.Tensor,
) -> torch.Tensor:
    """``input_gradient`` of each expert's rows: ``[R, K]``."""
    if (offsets := _offsets(dy_RN, counts_E)) is not None:
        weight_ENK = _dequantized(codes_ENK, scale_inv_Enk, dy_RN.dtype)
        return F.grouped_mm(dy_RN, weight_ENK, offs=offsets)
    parts = zip(dy_RN.split(list(counts_E)), codes_ENK, scale_inv_Enk, strict=True)
    return torch.cat([input_gradient(*part) for part in parts])


def weight_gradient_by_expert(
    dy_RN: torch.Tensor, x_RK: torch.Tensor, counts_E: Sequence[int]
) -> torch.Tensor:
    """``dy.T @ x`` of each expert's rows: ``[E, N, K]``."""
    if (offsets := _offsets(dy_RN, counts_E)) is not None:
        return F.grouped_mm(dy_RN.t(), x_RK, offs=offsets)
    parts = zip(dy_RN.split(list(counts_E)), x_RK.split(list(counts_E)), strict=True)
    return torch.stack([dy.t() @ x for dy, x in parts])


def _offsets(x_RK: torch.Tensor, counts_E: Sequence[int]) -> torch.Tensor | None:
    """Where each expert's rows end, for torch's grouped product; None where that has none."""
    if x_RK.dtype != torch.bfloat16 or not len(x_RK) or not hasattr(F, "grouped_mm"):
        return None
    return torch.tensor(counts_E).cumsum(0).to(torch.int32).to(x_RK.device)


def product_of(x: torch.Tensor) -> Product:
    """What multiplies these activations."""
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return "reference"
    return _product_on(x.device.index)


@cache
def _product_on(device: int) -> Product:
    if torch.cuda.get_device_capability(device) != HOPPER:
        return "reference"
    if _deep_gemm() is not None:
        return "deep_gemm"
    return "torch" if hasattr(F, "scaled_mm") else "reference"


@cache
def _deep_gemm() -> Any:
    try:
        import deep_gemm  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except (ImportError, AssertionError, OSError, RuntimeError):  # it looks for CUDA's compiler
        return None
    return deep_gemm if hasattr(deep_gemm, "fp8_gemm_nt") else None


def _codes_of(x_MK: torch.Tensor, *, power_of_two: bool) -> Quantized:
    from sgl_fp8rl.ops.activation_triton import quantize_tokens  # Triton, and a GPU

    return quantize_tokens(x_MK, power_of_two=power_of_two)


def _by_deep_gemm(x: Quantized, codes_NK: torch.Tensor, scale_inv_nk: torch.Tensor) -> torch.Tensor:
    y_MN = codes_NK.new_empty((len(x.codes_MK), len(codes_NK)), dtype=torch.bfloat16)
    # it wants plain tuples
    _deep_gemm().fp8_gemm_nt((x.codes_MK, x.scales_Mk), (codes_NK, scale_inv_nk), y_MN)
    return y_MN


def _by_torch(x: Quantized, codes_NK: torch.Tensor, scale_inv_nk: torch.Tensor) -> torch.Tensor:
    M = len(x.codes_MK)
    # cuBLAS reads columns of activation scales, and rows of weight scales, of whole 16 bytes
    codes_MK = F.pad(x.codes_MK.view(torch.uint8), (0, 0, 0, -M % ALIGNMENT)).view(codes_NK.dtype)
    scales_kM = F.pad(x.scales_Mk.t(), (0, -M % ALIGNMENT), value=1.0).contiguous()
    scale_inv_nk = F.pad(scale_inv_nk, (0, -scale_inv_nk.shape[1] % ALIGNMENT))
    y_MN: torch.Tensor = F.scaled_mm(  # type: ignore[attr-defined, unused-ignore]
        codes_MK,
        codes_NK.t(),
        scales_kM.t(),
        F.ScalingType.BlockWise1x128,  # type: ignore[attr-defined, unused-ignore]
        scale_inv_nk.t(),
        F.ScalingType.BlockWise128x128,  # type: ignore[attr-defined, unused-ignore]
        output_dtype=torch.bfloat16,
    )
    return y_MN[:M]


def _grouped(
    x_RK: torch.Tensor,
    counts_E: Sequence[int],
    codes_ENK: torch.Tensor,
    scale_inv_Enk: torch.Tensor,
    power_of_two: bool,
) -> torch.Tensor:
    counts = torch.tensor(counts_E)
    padded = (counts + BLOCK - 1) // BLOCK * BLOCK
    behind = (padded - counts).cumsum(0) - (padded - counts)  # rows of padding before each expert
    place_R = (torch.arange(len(x_RK)) + behind.repeat_interleave(counts)).to(x_RK.device)
    expert_P = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(padded)
    x_PK = x_RK.new_zeros((len(expert_P), x_RK.shape[1]))
    x_PK[place_R] = x_RK
    y_PN = x_RK.new_empty((len(expert_P), codes_ENK.shape[1]))
    tokens = tuple(_codes_of(x_PK, power_of_two=power_of_two))
    _deep_gemm().m_grouped_fp8_gemm_nt_contiguous(
        tokens, (codes_ENK, scale_inv_Enk), y_PN, expert_P.to(x_RK.device)
    )
    return y_PN[place_R]


def _dequantized(
    codes_NK: torch.Tensor, scale_inv_nk: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """As ``dequantize_weight``, of whole blocks: in two passes, without FP32 in memory."""
    weight_NK = codes_NK.to(dtype)  # exact
    blocks = weight_NK.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    torch.mul(blocks, scale_inv_nk[..., :, None, :, None], out=blocks)
    return weight_NK
