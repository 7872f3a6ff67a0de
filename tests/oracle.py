"""Block FP8 in float64 NumPy: an oracle that shares no code with ``sgl_fp8rl.ops``.

It searches an explicit table of the 256 E4M3 values and walks blocks in plain loops. What the
contract rounds to FP32 (the scale and the quotient) is rounded here too, so bytes must be equal.
Shape suffixes as in ``sgl_fp8rl.ops.reference``; codes are ``uint8`` bytes.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.uint8]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

BLOCK = 128
FP8_MAX = np.float32(448)
AMAX_FLOOR = np.float32(1e-10)


def _value(code: int) -> float:
    """OCP FP8 (E4M3): bias 7, no infinities, S.1111.111 is NaN."""
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    hidden = 8 if exponent else 0
    return (-1.0) ** sign * (hidden + mantissa) / 8 * 2.0 ** (max(exponent, 1) - 7)


E4M3: F64 = np.array([_value(code) for code in range(256)])
_POSITIVE = E4M3[:127]  # 0 .. 448, increasing with the code
_MIDDLE = (_POSITIVE[:-1] + _POSITIVE[1:]) / 2  # exact in float64


def encode(x: NDArray[np.floating[Any]]) -> Codes:
    """The nearest E4M3 value, ties to the even code, saturating at 448; keeps the sign of zero."""
    magnitude = np.abs(x.astype(np.float64))
    low = np.searchsorted(_MIDDLE, magnitude, side="left")
    tie = (low < len(_MIDDLE)) & (magnitude == _MIDDLE[np.minimum(low, len(_MIDDLE) - 1)])
    code = np.where(tie & (low % 2 == 1), low + 1, low)
    return np.asarray(code + 128 * np.signbit(x), np.uint8)


def decode(codes: Codes) -> F64:
    """The value of each code, exact."""
    return np.take(E4M3, codes)


def half_ulp(codes: Codes) -> F64:
    """Half the distance between E4M3 neighbours in the binade of each code."""
    exponent = np.maximum((codes >> 3) & 15, 1).astype(np.float64)
    return np.asarray(2.0 ** (exponent - 7 - 3 - 1))


def _tiles(shape: tuple[int, ...], rows: int) -> list[tuple[tuple[Any, ...], tuple[int, ...]]]:
    """(slice of the elements, index of the scale) of each ``rows`` x 128 tile."""
    *lead, N, K = shape
    return [
        ((*e, slice(i * rows, (i + 1) * rows), slice(j * BLOCK, (j + 1) * BLOCK)), (*e, i, j))
        for e in np.ndindex(*lead)
        for i in range(-(-N // rows))
        for j in range(-(-K // BLOCK))
    ]


def _scale(amax: np.float32, power_of_two: bool) -> np.float32:
    largest = np.maximum(amax, AMAX_FLOOR)
    if not power_of_two:
        return np.float32(largest / FP8_MAX)
    fraction, exponent = math.frexp(float(largest) / 448)  # in float64, and the fraction below 1
    return np.float32(2.0 ** (exponent - (fraction == 0.5)))


def _quantize(x: F32, rows: int, power_of_two: bool) -> tuple[Codes, F32]:
    *lead, N, K = x.shape
    codes = np.zeros(x.shape, np.uint8)
    scale = np.zeros((*lead, -(-N // rows), -(-K // BLOCK)), np.float32)
    for tile, index in _tiles(x.shape, rows):
        amax = np.max(np.abs(x[tile]))
        scale[index] = _scale(amax, power_of_two)
        codes[tile] = encode(x[tile] / scale[index])
    return codes, scale


def _dequantize(codes: Codes, scale: F32, rows: int) -> F64:
    value = decode(codes)
    for tile, index in _tiles(codes.shape, rows):
        value[tile] *= float(scale[index])
    return value


def quantize_weight(weight_NK: F32, *, power_of_two: bool = False) -> tuple[Codes, F32]:
    """Codes ``[..., N, K]`` and one FP32 scale a 128x128 block."""
    return _quantize(weight_NK, BLOCK, power_of_two)


def dequantize_weight(codes_NK: Codes, scale_inv_nk: F32) -> F64:
    """``codes * scale`` without rounding."""
    return _dequantize(codes_NK, scale_inv_nk, BLOCK)


def quantize_activation(x_MK: F32, *, power_of_two: bool = False) -> tuple[Codes, F32]:
    """Codes ``[..., M, K]`` and one FP32 scale a token and 128 channels."""
    return _quantize(x_MK, 1, power_of_two)


def dequantize_activation(codes_MK: Codes, scales_Mk: F32) -> F64:
    """``codes * scale`` without rounding."""
    return _dequantize(codes_MK, scales_Mk, 1)


# FP32 rounds the quotient before E4M3 does: relative 2**-24 of a quotient that is at most
# 2**5 half ulps, so the error may pass half an ulp by 2**-19 of it.
DOUBLE_ROUNDING = 1 + 2.0**-19


def excess_error(x: F32, codes: Codes, scale: F32, rows: int) -> float:
    """Largest error of ``codes * scale`` against ``x``, in units of its bound.

    The bound of an element is half an ulp of its code times the scale of its block. At most 1.0
    when codes and scales belong together; ``rows`` is 128 for a weight and 1 for an activation.
    """
    bound = half_ulp(codes) * DOUBLE_ROUNDING
    error = np.abs(x.astype(np.float64) - _dequantize(codes, scale, rows))
    for tile, index in _tiles(codes.shape, rows):
        bound[tile] *= float(scale[index])
    return float(np.max(error / bound))


def linear(
    x_MK: F32,
    codes_NK: Codes,
    scale_inv_nk: F32,
    bias_N: F32 | None = None,
    *,
    power_of_two: bool = False,
) -> F64:
    """``dequant(quant(x)) @ dequant(W).T + bias`` in float64: ``[M, N]``."""
    x = dequantize_activation(*quantize_activation(x_MK, power_of_two=power_of_two))
    y = x @ dequantize_weight(codes_NK, scale_inv_nk).T
    return np.asarray(y if bias_N is None else y + bias_N)
