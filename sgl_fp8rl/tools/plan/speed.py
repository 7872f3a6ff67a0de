"""Ways to serve, what memory they leave to the KV cache, and the time of their decode steps and
prefills on one H200.

A step reads the weights and multiplies by them, reads the KV cache, and has costs in each layer and
for each sequence. Each cost is a quantity that the shape gives, times a coefficient of the way to
serve. ``python -m benchmarks.plan`` fits the coefficients to measured steps and prefills; a way
that was not measured with today's kernels has none.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sgl_fp8rl.protocol.kv_schema import E4M3, INT8
from sgl_fp8rl.tools.plan.shape import BF16, BF16_BYTES, Shape

FIGURES = Path(__file__).with_name("nvidia-h200.json")
PEAK_BF16, PEAK_FP8 = 989e9, 1979e9
"""Operations in a millisecond, of NVIDIA's data sheet of the H200 SXM: the unit of arithmetic."""
MIB, GIB = 1 << 20, 1 << 30
MOST_IN_GRAPH = 1024
"""Sequences of the largest CUDA graph for which room is left."""
H200, H100 = "h200", "h100"
H100_BYTES = 79.18 * GIB
"""What CUDA 13 reports of an H100 80GB HBM3, driver 580."""


@dataclass(frozen=True)
class Arm:
    """One way to serve. Its names are those of the benchmarks."""

    name: str
    fp8: bool
    kv_cache: str
    """What it is in, of ``shape.KV_BYTES``."""
    flags: str
    holds_as: str = ""
    """The measured arm that has as much memory besides weights and KV cache, if it is another."""

    @property
    def figures(self) -> dict[str, float] | None:
        """Its coefficients, or None where it was not measured with today's kernels."""
        found: dict[str, float] | None = figures()["arms"].get(self.name)
        return found

    @property
    def own_bytes(self) -> float:
        """What an engine holds for itself: context, kernels, workspaces."""
        found: float = figures()["own_bytes"][self.holds_as or self.name]
        return found


KV8 = "--kv-cache-dtype fp8_e4m3"
XQA = "--prefill-attention-backend fa3 --decode-attention-backend trtllm_mha --page-size 64"
ARMS = (
    Arm("stock-bf16", False, BF16, ""),
    Arm("stock-block-fp8", True, BF16, "--quantization fp8", "stock-bf16"),
    Arm("stock-block-fp8-kv8-xqa", True, E4M3, f"--quantization fp8 {KV8} {XQA}"),
    Arm("fp8rl", True, BF16, "--quantization fp8rl", "stock-bf16"),
    Arm("fp8rl-kv8", True, E4M3, f"--quantization fp8rl {KV8}"),
    Arm("fp8rl-kv8-int8", True, INT8, "--quantization fp8rl --fp8rl-kv-cache int8"),
)


@cache
def figures() -> dict[str, Any]:
    """Of an H200, with their source and how far they are off."""
    stored: dict[str, Any] = json.loads(FIGURES.read_text())
    return stored


def idle_bytes(gpu: str) -> float:
    """Free on a GPU before anything runs."""
    measured: float = figures()["idle_bytes"]
    return measured if gpu == H200 else H100_BYTES


def mem_fraction_static(free_bytes: float, tp: int, chunk: int, requests: int) -> float:
    """What leaves an engine room for activations and CUDA graphs, as SGLang estimates them
    (``ServerArgs._handle_gpu_memory_settings``, 0.5.17), of the memory that is free when it starts.
    SGLang's own choice takes the whole GPU for free.

    Args:
        tp: GPUs of the engine.
        chunk: ``chunked_prefill_size``.
        requests: that the engine is given.
    """
    mib = 512 + 1.5 * max(chunk, 2048) + 128 * tp + 2 * min(requests, MOST_IN_GRAPH)
    room = max(mib, 10 * 1024) * MIB / max(free_bytes, 1.0)
    return max(math.floor(1e3 * (1 - room)) / 1e3, 0.0)


def kv_tokens(free_bytes: float, shape: Shape, arm: Arm, tp: int, fraction: float) -> int:
    """Tokens of the KV cache of an engine; at most 0 where not even the weights fit.

    Args:
        free_bytes: of a GPU when the engine starts.
        tp: GPUs of the engine.
        fraction: the engine's ``mem_fraction_static``.
    """
    static = fraction * free_bytes - arm.own_bytes
    held = shape.weight_bytes(arm.fp8) / tp
    return int((static - held) / shape.kv_token_bytes(arm.kv_cache, tp))


def weights_ms(arm: Arm, shape: Shape, batch: int, compute: float, bytes_ms: float) -> float:
    """Reading the weights and multiplying by them, which overlap in part.

    Args:
        compute: time of a linear's arithmetic, over that by the data sheet.
        bytes_ms: that a copy moves in a millisecond.
    """
    held = shape.linear_bytes(arm.fp8) + shape.head_weights * BF16_BYTES
    peak = PEAK_FP8 if arm.fp8 else PEAK_BF16
    flops = shape.linear_weights / peak + shape.head_weights / PEAK_BF16
    return math.hypot(held / bytes_ms, compute * 2.0 * batch * flops)


def decode_quantities(
    arm: Arm, shape: Shape, batch: int, kv_tokens: float, bytes_ms: float
) -> dict[str, float]:
    """What a decode step costs besides its weights, by coefficient.

    Args:
        kv_tokens: of all sequences together.
        bytes_ms: that a copy moves in a millisecond.
    """
    return {
        "layer": float(shape.layers),
        "kv": kv_tokens * shape.kv_token_bytes(arm.kv_cache) / bytes_ms,
        "activations": shape.layers * shape.hidden * BF16_BYTES * batch / bytes_ms,
    }


def prefill_quantities(
    arm: Arm, shape: Shape, lengths: Sequence[int], batches: int
) -> dict[str, float]:
    """What a prefill costs, by coefficient.

    Args:
        lengths: of the prompts.
        batches: forward passes that they take.
    """
    peak = PEAK_FP8 if arm.fp8 else PEAK_BF16
    return {
        "compute": 2.0 * shape.linear_weights * sum(lengths) / peak,
        "prefill_attention": sum(map(shape.attention_flops, lengths)) / PEAK_BF16,
        "prefill_layer": float(batches * shape.layers),
    }


@dataclass(frozen=True)
class Speed:
    """Times of one way to serve a dense model."""

    arm: Arm
    shape: Shape
    coefficients: dict[str, float]
    """Of ``decode_quantities`` and ``prefill_quantities``."""
    bytes_ms: float
    """That a copy moves in a millisecond."""

    def decode_ms(self, batch: int, kv_tokens: float) -> float:
        """One step of a batch; linear in the tokens of the KV cache."""
        found = decode_quantities(self.arm, self.shape, batch, kv_tokens, self.bytes_ms)
        compute = self.coefficients["compute"]
        return self._sum(found) + weights_ms(self.arm, self.shape, batch, compute, self.bytes_ms)

    def prefill_ms(self, lengths: Sequence[int], batches: int) -> float:
        """All of these prompts, in so many forward passes."""
        return self._sum(prefill_quantities(self.arm, self.shape, lengths, batches))

    def _sum(self, quantities: dict[str, float]) -> float:
        return sum(self.coefficients[name] * count for name, count in quantities.items())
