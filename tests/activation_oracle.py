"""Quantized activations in float64 NumPy and plain loops, and values to try.

Shares no code with ``sgl_fp8rl.ops``: E4M3 is the table of its 256 values in
``tests/oracle.py``. What SGLang's kernels round to FP32 is rounded here too, so codes and scales
must be equal byte for byte; norms and SiLU are exact, and y is held against them in ulps.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from tests import oracle

Tensor = torch.Tensor
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

BF16_MAX = torch.finfo(torch.bfloat16).max
MAX_ULPS = 0.51
"""Of y from the exact value, in BF16 ulps: the rounding is half of one. Measured: 0.50003."""


def rows(M: int, K: int, *, seed: int = 0, spread: float = 6.0) -> Tensor:
    """BF16 [M, K] on the CPU; groups differ in magnitude, so that a misplaced scale shows."""
    random = torch.Generator().manual_seed(seed)
    gain = torch.exp2((torch.rand(M, -(-K // 128), generator=random) - 0.5) * 2 * spread)
    x = torch.randn(M, K, generator=random) * gain.repeat_interleave(128, 1)[:, :K]
    return x.bfloat16()


def planted() -> Tensor:
    """BF16 [M, 256]: in each row one group of special or extreme values, and one of others."""
    groups = [
        [0.0] * 128,
        [-0.0] * 128,
        [math.nan] * 128,
        [math.nan] + [1.5, -3.0] * 63 + [0.5],
        [math.inf] + [1.0, -1.0, -0.0, math.nan] * 31 + [math.inf, -math.inf, 0.0],
        [-math.inf] + [7.0] * 127,
        [BF16_MAX, -BF16_MAX, 1.0] + [1e38] * 125,
        [2.0**126, -(2.0**125)] + [2.0**117, 3.0] * 63,
        [2.0**126 * 1.0078125] + [2.0**125] * 127,
        [1e-10, -1e-10, 9e-11, 1.1e-10] * 32,
        [1e-11] * 128,
        [1e-40, -1e-40] * 64,
        # Scales that are powers of two: every code's midpoint, and its neighbours, at an amax 448.
        [448.0, *((oracle.E4M3[:126] + oracle.E4M3[1:127]) / 2).tolist(), -448.0],
        [7.0, *((oracle.E4M3[:126] + oracle.E4M3[1:127]) / -128).tolist(), 0.0],
    ]
    x = torch.tensor(groups).bfloat16()
    return torch.cat([x, rows(len(groups), 128)], dim=1)


def quantize(x_MK: Tensor, *, power_of_two: bool = False) -> tuple[NDArray[np.uint8], F32]:
    """Codes as bytes, and scales [M, K / 128]."""
    x = x_MK.float().cpu().numpy()
    M, K = x.shape
    codes = np.zeros((M, K), np.uint8)
    scales = np.zeros((M, K // 128), np.float32)
    for i, j in np.ndindex(M, K // 128):
        group = x[i, j * 128 : (j + 1) * 128].astype(np.float64)
        numbers = np.abs(group[~np.isnan(group)])
        amax = max(float(numbers.max(initial=0.0)), float(np.float32(1e-10)))
        if power_of_two:
            scales[i, j] = 2.0 ** np.ceil(np.log2(amax / 448))
            multiplier = np.float32(1 / float(scales[i, j]))
        else:
            scales[i, j] = np.float32(amax * float(np.float32(1 / 448)))
            reciprocal = np.float32(0.0 if amax > 2.0**126 else 1 / amax)
            multiplier = np.float32(448 * float(reciprocal))
        with np.errstate(invalid="ignore"):
            quotient = (group * float(multiplier)).astype(np.float32)
        quotient[np.isnan(quotient)] = 448
        codes[i, j * 128 : (j + 1) * 128] = oracle.encode(quotient)
    return codes, scales


def rms_norm(x_MK: Tensor, weight_K: Tensor, eps: float, residual_MK: Tensor | None) -> F64:
    """Exact but for h = x + residual, which is FP32."""
    h = x_MK.float() if residual_MK is None else x_MK.float() + residual_MK.float()
    h64 = h.cpu().numpy().astype(np.float64)
    mean = np.array([math.fsum(row * row) / len(row) for row in h64])
    weight = weight_K.float().cpu().numpy().astype(np.float64)
    return np.asarray(h64 / np.sqrt(mean + np.float32(eps))[:, None] * weight)


def silu_mul(gate_up_M2I: Tensor) -> tuple[F64, F64]:
    """(exact, what may be lost where the sigmoid is flushed to 0)."""
    gate, up = np.split(gate_up_M2I.float().cpu().numpy().astype(np.float64), 2, axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(gate / (1 + np.exp(-gate)) * up), np.abs(gate * up) * 2.0**-126


def ulps(y: Tensor, exact: F64, flushed: F64 | float = 0.0) -> float:
    """The largest distance of BF16 values from exact ones, in BF16 ulps of the exact ones."""
    exponent = np.frexp(np.abs(exact))[1].astype(np.float64) - 1
    ulp = 2.0 ** (np.maximum(exponent, -126) - 7)
    got = y.float().cpu().numpy().astype(np.float64)
    return float(np.max((np.abs(got - exact) - flushed) / ulp))


def apart(y: Tensor, other: Tensor) -> tuple[int, float]:
    """(most BF16 values between two elements, share of equal ones); NaN is NaN's equal."""
    pair = [t.cpu().contiguous().view(torch.int16).int() for t in (y, other)]
    # Magnitudes of negative values count down from 0: neighbours differ by 1, across 0 too.
    mine, its = (torch.where(t < 0, -(t & 0x7FFF), t) for t in pair)
    steps = torch.where(y.isnan().cpu() & other.isnan().cpu(), 0, (mine - its).abs())
    return int(steps.max()), float((steps == 0).float().mean())
