"""Block-FP8 products in float64 NumPy, and cases to hold any GEMM of them against.

The oracle shares no code with ``sgl_fp8rl``: codes are bytes, decoded by the table in
``tests/oracle.py``. Shape suffixes as in ``sgl_fp8rl.numerics.reference``.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tests import oracle
from tests.oracle import BLOCK, F32, F64, Codes

BF16_ROUNDING = 2.0**-8
"""Half an ulp of its 8 bits, relative to a result."""
OUTLIER = 300.0
"""How much louder an outlier channel is; LLM activations have such."""


@dataclass(frozen=True)
class Case:
    """Operands of one product."""

    codes_MK: Codes
    scales_Mk: F32
    weight_NK: Codes
    scales_nk: F32

    @cached_property
    def product(self) -> F64:
        """``dequant(x) @ dequant(W).T``: ``[M, N]``."""
        x = oracle.dequantize_activation(self.codes_MK, self.scales_Mk)
        return np.asarray(x @ oracle.dequantize_weight(self.weight_NK, self.scales_nk).T)

    @cached_property
    def magnitude(self) -> F64:
        """The sums of the products' magnitudes: ``[M, N]``."""
        codes_MK, weight_NK = self.codes_MK & 0x7F, self.weight_NK & 0x7F
        return Case(codes_MK, self.scales_Mk, weight_NK, self.scales_nk).product

    def excess(self, got_MN: F64, accumulation: float) -> float:
        """The largest error of a BF16 result in units of its bound; NaN if there is one.

        Args:
            accumulation: error of the sums, relative to the sum of the products' magnitudes.
        """
        bound = np.abs(self.product) * BF16_ROUNDING + self.magnitude * accumulation
        return float(np.max(np.abs(got_MN - self.product) / bound))


def case(M: int, N: int, K: int, *, outliers: bool = False, seed: int = 0) -> Case:
    """Normal operands in which each block of each differs in size.

    Args:
        outliers: a few channels of the activations and of the weight, and one token, are
            ``OUTLIER`` times as large as the others.
    """
    random = np.random.default_rng([M, N, K, seed])
    x = random.standard_normal((M, K)).astype(np.float32)
    weight = random.standard_normal((N, K)).astype(np.float32)
    # By powers of two and from block to block, so that a scale in the wrong place shows.
    k = np.arange(K) // BLOCK
    x *= np.exp2((np.arange(M)[:, None] + 2 * k) % 5 - 2).astype(np.float32)
    weight *= np.exp2((3 * (np.arange(N)[:, None] // BLOCK) + k) % 7 - 3).astype(np.float32)
    if outliers:
        channels = random.choice(K, 5, replace=False)
        x[:, channels] *= OUTLIER
        x[random.integers(M)] *= OUTLIER
        weight[:, channels[:2]] *= OUTLIER
    return Case(*oracle.quantize_activation(x), *oracle.quantize_weight(weight))


def cosine_distance(got: F64, want: F64) -> float:
    """1 - cosine of two arrays taken as vectors."""
    return float(1 - np.vdot(got, want) / np.linalg.norm(got) / np.linalg.norm(want))
