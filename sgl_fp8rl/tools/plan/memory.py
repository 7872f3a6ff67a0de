"""How many tokens an engine's KV cache holds."""

import math

from sgl_fp8rl.tools.plan.shape import Shape
from sgl_fp8rl.tools.plan.speed import Arm, figures

MIB, GIB = 1 << 20, 1 << 30
MOST_IN_GRAPH = 1024
"""Sequences of the largest CUDA graph for which room is left."""
H200, H100 = "h200", "h100"
H100_BYTES = 79.18 * GIB
"""What CUDA 13 reports of an H100 80GB HBM3, driver 580."""


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
