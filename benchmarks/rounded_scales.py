"""What block FP8 loses by scales that are powers of two, on a CPU.

  weights     matrices of a pretrained model, Gaussian ones, and Gaussian ones with outlier channels
  tokens      activations, normal and with outliers
  products    of such tokens and a pretrained matrix, against the float64 product of the BF16 values

An error is the root mean square of a difference, as a part of that of the exact values.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from safetensors.torch import load_file

from benchmarks.benchmark import Benchmark, Job, Measurement, Run
from benchmarks.pretrained import checkpoint, weights
from sgl_fp8rl.formats import BLOCKS
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.gemm.bench_inputs import OUTLIER, random_activations
from sgl_fp8rl.ops.reference import dequantize_activation, fp8_linear, quantize_activation

TOKENS, HIDDEN = 256, 4096
OUTLIERS = 97
"""One channel in so many."""
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Matrices:
    """What is looked at of the pretrained model."""

    every: int = weights.EVERY


def measure(spec: Matrices, run: Run) -> list[Measurement]:
    """The errors of each format."""
    named = load_file(checkpoint.convert(run.shared / "model") / "model.safetensors")
    names = sorted(name for name in named if "_proj" in name)[:: spec.every]
    return list(errors([named[name].to(BF16) for name in names]))


def errors(matrices: list[torch.Tensor]) -> Iterator[Measurement]:
    """Of these matrices, and of tokens and products of as many columns."""
    random = torch.Generator().manual_seed(0)
    normal = [torch.randn(weight.shape, generator=random).to(BF16) for weight in matrices]
    outlying = [weight.clone() for weight in normal]
    for weight in outlying:
        weight[:, ::OUTLIERS] *= OUTLIER
    tokens = dict(zip(TOKENS_OF, random_activations(TOKENS, HIDDEN, random), strict=True))
    inputs = [random_activations(TOKENS, weight.shape[1], random) for weight in matrices]
    for fmt in BLOCKS:
        found = {
            f"weights, {name}": [_error(fmt.decode(fmt.encode(each)), each) for each in those]
            for name, those in zip(WEIGHTS, (matrices, normal, outlying), strict=True)
        }
        found |= {f"tokens, {name}": [_token_error(fmt, x)] for name, x in tokens.items()}
        for number, name in enumerate(TOKENS_OF):
            pairs = zip(matrices, inputs, strict=True)
            found[f"product, tokens {name}"] = [_product_error(fmt, w, x[number]) for w, x in pairs]
        for case, values in found.items():
            measured = {"error": values}
            yield {"arm": fmt.name, "model": "smollm2-135m", "case": case, "values": measured}


WEIGHTS = ("pretrained", "Gaussian", "Gaussian with outlier channels")
TOKENS_OF = ("normal", "with outliers")


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def _token_error(fmt: WeightFormat, x_MK: torch.Tensor) -> float:
    tokens = quantize_activation(x_MK, power_of_two=fmt.power_of_two_scales)
    return _error(dequantize_activation(*tokens), x_MK)


def _product_error(fmt: WeightFormat, weight_NK: torch.Tensor, x_MK: torch.Tensor) -> float:
    codes, scales = fmt.encode(weight_NK).values()
    y = fp8_linear(x_MK.float(), codes, scales, power_of_two=fmt.power_of_two_scales)
    return _error(y, x_MK.double() @ weight_NK.double().T)


BENCHMARK = Benchmark((Job("pretrained", Matrices()),), measure, limit_s=600.0, gpu="unused")
