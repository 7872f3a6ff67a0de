"""A weight whose FP8 codes are known exactly, and the codes that we compute.

The expected values follow from the definition of E4M3 (OCP 8-bit floating point, revision 1.0,
section 5: 4 exponent bits with bias 7, 3 mantissa bits, largest 448) in float64, without the code
under test.

Shape suffixes: N output and K input features, both 256: two blocks of 128 each way.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from sgl_fp8rl.ops import reference
from sgl_fp8rl.protocol.manifest import describe
from sgl_fp8rl.receiver.checkpoint_source import write_all
from sgl_fp8rl.receiver.engine_weights import EngineWeights

Float64 = npt.NDArray[np.float64]

BLOCK = 128
E4M3_MAX = 448.0
E4M3_MIN_EXPONENT = -6
E4M3_MAX_EXPONENT = 8
E4M3_MANTISSA_BITS = 3
SCALES = ((2.0**-12, 2.0**-3), (1.0, 0.0))
"""Scale of each block. With powers of two only the cast to E4M3 rounds, so the result is exact; the
last block is all zeros, whose scale may be any positive number."""


def known_weight() -> Float64:
    """A weight ``[256, 256]``, exact in BF16, whose blocks have the amax ``448 * SCALES``."""
    side = len(SCALES) * BLOCK
    # 11 and 3 are coprime to 255: every value of -127..127 occurs in every block.
    rows, columns = np.indices((side, side))
    steps = (rows * 11 + columns * 3) % 255 - 127
    weight_NK: Float64 = steps.astype(np.float64) * 2.0
    weight_NK[::BLOCK, ::BLOCK] = E4M3_MAX
    weight_NK *= _scales_of_elements()
    return weight_NK


def expected_after_fp8() -> Float64:
    """The exact result of quantizing and dequantizing :func:`known_weight`."""
    scales_NK = _scales_of_elements()
    scaled_NK = known_weight() / np.where(scales_NK == 0.0, 1.0, scales_NK)
    return nearest_e4m3(scaled_NK) * scales_NK


def nearest_e4m3(value: Float64) -> Float64:
    """The nearest E4M3 number, ties to even, saturating at 448."""
    _, exponent = np.frexp(value)  # value = fraction * 2**exponent, fraction in [0.5, 1)
    exponent = np.clip(exponent - 1, E4M3_MIN_EXPONENT, E4M3_MAX_EXPONENT)
    step = np.exp2(exponent - E4M3_MANTISSA_BITS)
    nearest: Float64 = np.clip(np.rint(value / step) * step, -E4M3_MAX, E4M3_MAX)
    return nearest


def count_wrong(read_NK: Float64) -> int:
    """The number of values that differ from the expected ones; NaN counts as wrong."""
    return int(np.count_nonzero(read_NK != expected_after_fp8()))


def sees_faults(read_NK: Float64) -> bool:
    """Whether :func:`count_wrong` notices one wrong scale and one wrong value in ``read_NK``."""
    wrong_scale_NK, wrong_value_NK = read_NK.copy(), read_NK.copy()
    wrong_scale_NK[:BLOCK, :BLOCK] *= 1.125
    wrong_value_NK[0, 0] = -read_NK[0, 0]
    return min(count_wrong(wrong_scale_NK), count_wrong(wrong_value_NK)) > count_wrong(read_NK)


def quantize_and_read(device: str) -> list[Float64]:
    """Quantize and dequantize :func:`known_weight` with our code."""
    weight_NK = torch.from_numpy(known_weight()).to(device, torch.bfloat16)
    return [_to_float64(*reference.quantize_weight(weight_NK))]


def update_and_read(device: str) -> list[Float64]:
    """Run a whole update session of a model with two stacked projections, and dequantize.

    The second projection gets the negated weight, and its result is negated again: two copies of
    :func:`known_weight`, both wrong if the halves are swapped.
    """
    weight_NK = torch.from_numpy(known_weight()).to(device, torch.bfloat16)
    model = _Stacked(device)
    weights = EngineWeights(model, torch.bfloat16)
    tensors = list(zip(_Stacked.names, (weight_NK, -weight_NK), strict=True))
    manifest = describe(tensors, chunk_bytes=1 << 20)
    weights.accept(manifest)
    write_all(weights, manifest, tensors)
    both_NK = _to_float64(model.weight, model.weight_scale_inv)
    first_NK, second_NK = np.split(both_NK, 2)
    return [first_NK, -second_NK]


class _Stacked(nn.Module):
    """Two projections in one FP8 parameter, as SGLang stacks gate and up."""

    names = ("gate_proj.weight", "up_proj.weight")

    def __init__(self, device: str) -> None:
        super().__init__()
        side = len(SCALES) * BLOCK
        weight = torch.zeros(2 * side, side, dtype=reference.FP8_DTYPE, device=device)
        scale_inv = torch.full((2 * len(SCALES), len(SCALES)), torch.nan, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale_inv, requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.weight.data.chunk(2)[self.names.index(name)].copy_(tensor)


def _to_float64(codes_NK: torch.Tensor, scale_inv_nk: torch.Tensor) -> Float64:
    weight_NK: Float64 = reference.dequantize_weight(codes_NK, scale_inv_nk).double().cpu().numpy()
    return weight_NK


def _scales_of_elements() -> Float64:
    return np.kron(np.array(SCALES), np.ones((BLOCK, BLOCK)))
