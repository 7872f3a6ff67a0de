"""KV tokens of engines on GPUs of 80 GB, by the arithmetic of ``sgl-fp8rl plan``."""

from typing import Any

from benchmarks.engines.keywords import FULL
from benchmarks.engines.models import MODELS, config
from benchmarks.tables.markdown import grid
from sgl_fp8rl.plan import memory, shape
from sgl_fp8rl.plan.speed import ARMS

NAMES = ("stock-bf16", "fp8rl", "fp8rl-kv8")
GPUS = (("one GPU", 1), ("TP 2", 2))


def capacities(_: Any) -> str:
    """What an engine holds that has the GPU to itself; nothing of it was measured."""
    gpu = memory.gpus()["h100"]
    arms = [arm for arm in ARMS if arm.name in NAMES]
    lines = []
    for model, of in MODELS.items():
        size = shape.of(config(of))
        for where, tp in GPUS:
            fits = [
                memory.kv_tokens(gpu, size, arm, tp, 0.0, FULL["mem_fraction_static"])
                for arm in arms
            ]
            cells = [f"{tokens:,}" if tokens > 0 else "does not fit" for tokens in fits]
            lines.append([f"{model}, {where}", *cells])
    return grid(["KV tokens", *(arm.name for arm in arms)], lines)
