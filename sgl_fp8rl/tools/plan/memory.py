"""How many tokens an engine's KV cache holds."""

import math
from dataclasses import dataclass

from sgl_fp8rl.protocol.kv_schema import WORKSPACE_BYTES
from sgl_fp8rl.tools.plan.measured import figures
from sgl_fp8rl.tools.plan.shape import BF16, Shape
from sgl_fp8rl.tools.plan.speed import Arm

MIB, GIB = 1 << 20, 1 << 30
MOST_IN_GRAPH = 1024
"""Sequences of the largest CUDA graph for which room is left."""
H100_BYTES = 79.18 * GIB
"""What CUDA 13 reports of an H100 80GB HBM3, driver 580."""


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    name: str
    idle_bytes: float
    """Free before anything runs."""
    engine_bytes: float
    """What an engine takes for itself: context, kernels, workspaces."""
    scale: float
    """Time of a step over that on an H200."""
    source: str


def gpus() -> dict[str, Gpu]:
    """Those that ``plan`` knows, by name."""
    memory = figures()["memory"]
    own = memory["engine_bytes"]
    h200 = Gpu("h200", memory["idle_bytes"], own, 1.0, f"measured: {figures()['source']}")
    by_sheet = (
        "not measured: an H200's times by the data sheets' bandwidth, 4.8 and 3.35 TB/s; prefill, "
        "which is bound by arithmetic, takes less"
    )
    return {"h200": h200, "h100": Gpu("h100", H100_BYTES, own, 4.8 / 3.35, by_sheet)}


def mem_fraction_static(
    gpu: Gpu, tp: int, reserved_bytes: float, chunk: int, requests: int
) -> float:
    """What leaves an engine room for activations and CUDA graphs, as SGLang estimates them
    (``ServerArgs._handle_gpu_memory_settings``, 0.5.17), of the memory that is free when it starts.
    SGLang's own choice takes the whole GPU for free.

    Args:
        tp: GPUs of the engine.
        reserved_bytes: what others hold on each GPU.
        chunk: ``chunked_prefill_size``.
        requests: that the engine is given.
    """
    mib = 512 + 1.5 * max(chunk, 2048) + 128 * tp + 2 * min(requests, MOST_IN_GRAPH)
    room = max(mib, 10 * 1024) * MIB / max(gpu.idle_bytes - reserved_bytes, 1.0)
    return max(math.floor(1e3 * (1 - room)) / 1e3, 0.0)


def kv_tokens(
    gpu: Gpu, shape: Shape, arm: Arm, tp: int, reserved_bytes: float, fraction: float
) -> int:
    """Tokens of the KV cache of an engine; at most 0 where not even the weights fit.

    Args:
        tp: GPUs of the engine.
        reserved_bytes: what others hold on each GPU, such as a trainer beside it.
        fraction: the engine's ``mem_fraction_static``.
    """
    static = fraction * (gpu.idle_bytes - reserved_bytes) - gpu.engine_bytes
    if arm.stack == "ours" and arm.kv_cache != BF16:
        static -= WORKSPACE_BYTES
    held = shape.weight_bytes(arm.fp8) / tp
    return int((static - held) / shape.kv_token_bytes(arm.kv_cache, tp))
