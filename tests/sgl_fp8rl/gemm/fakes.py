"""Products on the CPU that stand for kernels, with times of their own."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from sgl_fp8rl.engine.gemm.candidates import STOCK, Candidate, Config, Kernel
from sgl_fp8rl.engine.tuning.bench_inputs import BenchInputs
from sgl_fp8rl.ops.reference import dequantize_activation, dequantize_weight

Tensor = torch.Tensor


def exact(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """The product as a good kernel has it: FP32 sums, rounded to BF16 once."""
    x = dequantize_activation(codes, scales)
    return (x @ dequantize_weight(weight, weight_scales).T).bfloat16()


def clipping(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """Right as long as no activation is above 10, as no normal one is."""
    x = dequantize_activation(codes, scales).clamp(-10, 10)
    return (x @ dequantize_weight(weight, weight_scales).T).bfloat16()


def one_scale_wrong(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    """One block of the weight takes its neighbour's scale."""
    wrong = weight_scales.clone()
    wrong[-1, 0] = weight_scales[-1, 1]
    return exact(codes, scales, weight, wrong)


def not_a_number(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor) -> Tensor:
    y = exact(codes, scales, weight, weight_scales)
    y[-1, -1] = torch.nan
    return y


def raising(*_: Tensor) -> Tensor:
    raise RuntimeError("no kernel image is available")


class Bench:
    """Candidates, and the time that each is said to take: by name, or by name and M."""

    def __init__(self, us: Mapping[str, float | Callable[[int], float]], **kernels: Kernel) -> None:
        self.us = us
        self.ran: list[str] = []
        self.candidates = {
            name: Candidate(name, lambda *_: None, self._bind(name, kernels.get(name, exact)))
            for name in us
        }

    def _bind(self, name: str, kernel: Kernel) -> Callable[[Config], Kernel]:
        def recorded(*operands: Tensor) -> Tensor:
            self.ran.append(name)
            self.m = operands[0].shape[0]
            return kernel(*operands)

        return lambda _config: recorded

    def timer(self, run: Callable[[int], object], sets: int) -> float:
        for index in range(sets):
            run(index)
        us = self.us[self.ran[-1]]
        return us(self.m) if callable(us) else us

    def inputs(self, n: int = 512, k: int = 256) -> BenchInputs:
        return BenchInputs(n, k, "cpu", self.timer)


def stock_and(**us: Any) -> dict[str, Any]:
    """DeepGEMM at 100 microseconds, and others."""
    return {STOCK: 100.0, **us}
