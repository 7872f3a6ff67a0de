"""Time of a decode step and of a prefill: sums of measured costs.

A step reads its weights and its KV cache, computes, passes over its activations, and has overhead
in each layer. The FP8 GEMMs of a layer are measured ones (``gemms``); each other cost is a
coefficient times a quantity that the shape gives. The coefficients were fitted to measured rows;
their file says to which, and how well they predict rows that they were not fitted to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sgl_fp8rl.protocol.kv_schema import E4M3, INT8
from sgl_fp8rl.tools.plan import gemms, xqa
from sgl_fp8rl.tools.plan.measured import figures
from sgl_fp8rl.tools.plan.shape import BF16, BF16_BYTES, Shape, element_bytes

H200_BYTES_MS = 4.27e9
"""Bytes that a copy on an H200 reads and writes in a millisecond: the unit of the quantities."""


@dataclass(frozen=True)
class Arm:
    """One way to serve. Its names are those of the benchmarks."""

    name: str
    stack: str
    """Whose kernels run around the GEMMs: "stock" or "ours"."""
    fp8: bool
    kv_cache: str
    """What it is in, of ``shape.KV_BYTES``."""
    flags: str

    @property
    def weights(self) -> str:
        return f"{'fp8' if self.fp8 else 'bf16'} {self.stack}"

    @property
    def kv(self) -> str:
        """What attends in decode; both stacks have the same for a BF16 cache. INT8, of which
        nothing was measured, counts as read by what reads E4M3."""
        return BF16 if self.kv_cache == BF16 else "XQA"


KV8 = "--kv-cache-dtype fp8_e4m3"
XQA = "--prefill-attention-backend fa3 --decode-attention-backend trtllm_mha --page-size 64"
ARMS = (
    Arm("stock-bf16", "stock", False, BF16, ""),
    Arm("stock-bf16-kv8-xqa", "stock", False, E4M3, f"{KV8} {XQA}"),
    Arm("stock-block-fp8", "stock", True, BF16, "--quantization fp8"),
    Arm("stock-block-fp8-kv8-xqa", "stock", True, E4M3, f"--quantization fp8 {KV8} {XQA}"),
    Arm("fp8rl", "ours", True, BF16, "--quantization fp8rl"),
    Arm("fp8rl-kv8", "ours", True, E4M3, f"--quantization fp8rl {KV8}"),
    Arm("fp8rl-kv8-int8", "ours", True, INT8, "--quantization fp8rl --fp8rl-kv-cache int8"),
)

Quantities = dict[str, float]


class Kernels(NamedTuple):
    """What single kernels take, besides the table of GEMMs."""

    lines: gemms.Lines
    xqa: xqa.Shares


def decode_quantities(
    arm: Arm,
    shape: Shape,
    batch: int,
    kv_tokens: float,
    kernels: Kernels,
    tp: int = 1,
) -> Quantities:
    """What a decode step costs, by coefficient.

    Args:
        kv_tokens: of all sequences together.
        kernels: times of single ones.
    """
    share = xqa.share(kernels.xqa, arm.stack, batch) if arm.kv_cache != BF16 else 1.0
    kv_bytes = kv_tokens * shape.kv_token_bytes(arm.kv_cache, tp)
    found: Quantities = {
        f"layer {arm.stack}": float(shape.layers),
        f"read KV {arm.kv}": kv_bytes / H200_BYTES_MS / share,
        f"attention {arm.kv}": float(batch * shape.layers),
        f"activations {arm.weights}": activations(shape, batch),
    }

    def add(weights: str, element_bytes: float, read: float, used: float) -> None:
        """Weights of which a step reads some, and computes with some for each token."""
        for name, quantity in (
            (f"read {weights}", read * element_bytes / H200_BYTES_MS),
            (f"compute {weights}", 2.0 * used * batch / 1e12),
        ):
            found[name] = found.get(name, 0.0) + quantity / tp

    # the head, which SGLang runs in BF16 in every arm
    add("bf16", BF16_BYTES, shape.head_weights, shape.head_weights)
    linears = shape.layers * shape.linear_weights
    if arm.fp8:
        found[f"GEMMs {arm.stack}"] = shape.layers * gemms.layer_ms(
            shape, batch, arm.stack, kernels.lines, tp
        )
    else:
        add("bf16", BF16_BYTES, linears, linears)
    if shape.experts:
        read = shape.layers * shape.mlp_weights * shape.experts_read(batch)
        used = shape.layers * shape.mlp_weights * shape.experts_per_token
        add(f"experts {arm.weights}", element_bytes(arm.fp8), read, used)
    return found


def prefill_quantities(
    arm: Arm,
    shape: Shape,
    lengths: Sequence[int],
    batches: int,
    kernels: Kernels,
    tp: int = 1,
) -> Quantities:
    """What a prefill costs, by coefficient.

    Args:
        lengths: of the prompts.
        batches: forward passes that they take.
        kernels: times of single ones.
    """
    tokens = sum(lengths)
    attention = sum(shape.attention_flops(length) for length in lengths)
    found: Quantities = {
        f"prefill layer {arm.stack}": float(batches * shape.layers),
        f"prefill attention {'fp8' if arm.kv_cache == E4M3 else BF16}": attention / 1e12 / tp,
        f"prefill activations {arm.weights}": activations(shape, tokens),
    }
    if arm.fp8:
        ms = gemms.layer_ms(shape, tokens / batches, arm.stack, kernels.lines, tp)
        found[f"prefill GEMMs {arm.stack}"] = batches * shape.layers * ms
    else:
        flops = 2.0 * shape.layers * shape.linear_weights * tokens
        found["prefill compute bf16"] = flops / 1e12 / tp
    if shape.experts:
        used = shape.layers * shape.mlp_weights * shape.experts_per_token
        found[f"prefill experts {arm.weights}"] = 2.0 * used * tokens / 1e12 / tp
    return found


def activations(shape: Shape, tokens: int) -> float:
    """The activations of all layers, at the bandwidth of a copy; a layer passes over them several
    times."""
    return shape.layers * shape.hidden * BF16_BYTES * tokens / H200_BYTES_MS


@dataclass(frozen=True)
class Speed:
    """Times on one kind of GPU."""

    coefficients: Mapping[str, float]
    """In ms, of one of each quantity."""
    kernels: Kernels
    scale: float = 1.0
    """Time on this GPU over time on the measured one."""

    def decode_ms(self, arm: Arm, shape: Shape, batch: int, kv_tokens: float, tp: int = 1) -> float:
        """One step of a batch."""
        return self._sum(decode_quantities(arm, shape, batch, kv_tokens, self.kernels, tp))

    def prefill_ms(
        self, arm: Arm, shape: Shape, lengths: Sequence[int], batches: int, tp: int = 1
    ) -> float:
        """All of these prompts."""
        return self._sum(prefill_quantities(arm, shape, lengths, batches, self.kernels, tp))

    def _sum(self, quantities: Quantities) -> float:
        each = self.coefficients
        return self.scale * sum(each[name] * count for name, count in quantities.items())


def speed_of(scale: float) -> Speed:
    """Of a GPU on which a step takes ``scale`` times as long as on an H200."""
    stored = figures()
    lines = {stack: gemms.Line(*line) for stack, line in stored["gemm_lines"].items()}
    return Speed(stored["coefficients_ms"], Kernels(lines, stored["xqa_shares"]), scale)
