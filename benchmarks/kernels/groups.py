"""Our kernels of a layer beside what SGLang runs in their place, on one GPU; Qwen3-8B's shapes.

  activations   quantization, alone and in RMSNorm and SiLU
  qk_rope       QK-norm, rotary embedding, FP8 KV store
  store         FP8 KV store
  sampler       temperature sampling with log-probabilities

Before a pair is timed it is checked to compute the same: the same codes, tokens or bytes, or values
that are next to each other. What is timed is a CUDA graph of 36 calls, each with tensors of
its own; the sampler runs as the engine runs it, outside of graphs. The first run on a
machine compiles SGLang's kernels: run it twice.
"""

import importlib

import torch

from benchmarks import measuring
from benchmarks.benchmark import Benchmark, Job, Measurement, Run
from benchmarks.kernels import pair

GROUPS = {
    "activations": "activation.pairs",
    "qk_rope": "kv.qk_rope",
    "store": "kv.store",
    "sampler": "sampler.pairs",
}
"""Module and function that yields pairs, which are measured in one process."""


def measure(group: str, run: Run) -> list[Measurement]:
    """Check and time the pairs of a group.

    Raises:
        RuntimeError: a pair does not agree.
    """
    torch.manual_seed(0)
    module, _, function = group.partition(".")
    pairs = getattr(importlib.import_module(f"benchmarks.kernels.{module}"), function)()
    return pair.measurements(pairs, measuring.copy_tb_s())


BENCHMARK = Benchmark(
    jobs=tuple(Job(name, group, stock=True) for name, group in GROUPS.items()),
    measure=measure,
    limit_s=240.0,
)
