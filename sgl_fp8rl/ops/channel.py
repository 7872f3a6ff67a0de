"""Channel FP8 and INT8 in plain torch: the reference for every kernel, and the arithmetic of the
CPU platform.

Each row has one FP32 scale: an output channel of a weight, or a token of the activations. A value
is ``code * scale``. Codes are E4M3 up to 448 or INT8 up to 127 (symmetric), as what SGLang calls
``w8a8_fp8`` and ``w8a8_int8`` computes with.

Shape suffixes as in ``reference.py``; 1 is the one scale of a row.
"""

import torch

from sgl_fp8rl.ops.reference import FP8_DTYPE, FP8_MAX, encode, scale_of

LARGEST = {FP8_DTYPE: FP8_MAX, torch.int8: 127.0}
"""The largest code of each dtype, which a row's amax becomes."""


def quantize_rows(x_NK: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to one scale for each row.

    Args:
        x_NK: BF16, FP16 or FP32, ``[..., N, K]``.
        dtype: of the codes, float8_e4m3fn or int8.

    Returns:
        ``codes_NK`` of the same shape, and ``scale_N1`` FP32 ``[..., N, 1]``.
        The scale of a row with NaN or Inf is that.
    """
    x = x_NK.float()
    scale_N1 = scale_of(x.abs().amax(dim=-1, keepdim=True), LARGEST[dtype])
    quotient = x / scale_N1
    if dtype == FP8_DTYPE:
        return encode(quotient), scale_N1
    return quotient.round().clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype), scale_N1


def dequantize_rows(codes_NK: torch.Tensor, scale_N1: torch.Tensor) -> torch.Tensor:
    """``codes * scale`` in FP32: ``[..., N, K]``."""
    return codes_NK.float() * scale_N1


def channel_linear(
    x_MK: torch.Tensor,
    codes_NK: torch.Tensor,
    scale_N1: torch.Tensor,
    bias_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """What a W8A8 GEMM with a scale for each row computes, in FP32; tokens get codes as the weight
    has. SGLang's kernels on a GPU multiply tokens by a reciprocal, and round those of INT8 away
    from zero at ties: some take the next code.

    Returns:
        ``[..., M, N]`` in the dtype of ``x_MK``.
    """
    tokens_MK, scale_M1 = quantize_rows(x_MK, codes_NK.dtype)
    y = (tokens_MK.float() @ codes_NK.float().T) * scale_M1 * scale_N1.T
    if bias_N is not None:
        y = y + bias_N.float()
    return y.to(x_MK.dtype)
