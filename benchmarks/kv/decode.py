"""Decode attention over 8-bit codes: error and bias by the mean of V, and time of a call.

Against float64 over the same codes (``code_error``, ``code_bias``), and over the values before they
were codes (``kv_error``). Splits are those of an engine. Shape suffixes as in ``attention_inputs``.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks import measuring
from benchmarks.benchmark import Benchmark, Job, Measurement, Run
from benchmarks.kv import attention_kernels as kernels
from benchmarks.kv.attention_inputs import Inputs, Load, draw, exact, off
from sgl_fp8rl.ops.reference import FP8_DTYPE

MODEL = "qwen3-8b"
TIMED = (
    (128, 512),
    (256, 512),
    (32, 2048),
    (1, 8192),
    (8, 8192),
    (64, 8192),
    (16, 30016),
    (4, 131072),
)
UNEVEN = ((256, 4096), (128, 5504), (64, 8192), (32, 8192))
"""As of the running requests of a rollout."""
MEANS = (0.0, 0.3, 1.0)
CASES = [
    *(Load(batch, context, v_mean=mean) for batch, context in TIMED for mean in MEANS),
    *(Load(batch, context, v_mean=1.0, softmax="flat") for batch, context in TIMED[-3:]),
    *(Load(batch, context, uneven=True) for batch, context in UNEVEN),
]
DEVICE = "cuda"
REPLAYS, CALLS = 10, 8
"""Of a graph, and in it."""
APART_BYTES = 1 << 30
"""Calls of a graph go round so much cache, many times a GPU's L2."""


class Arm(NamedTuple):
    """A kernel, its codes, and what they stand for."""

    name: str
    attend: kernels.Attend
    caches: kernels.Caches
    meant: Inputs


def measure(_: Any, run: Run) -> list[Measurement]:
    """Errors of every case, and times of those whose V has no mean, which changes no time."""
    copy_tb_s = measuring.copy_tb_s()
    made = [found for load in CASES for found in _case(load, copy_tb_s)]
    made[0]["values"]["copy_tb_s"] = [copy_tb_s]
    return made


def _case(load: Load, copy_tb_s: float) -> Iterator[Measurement]:
    inputs = draw(load, DEVICE)
    wanted = exact(inputs)
    for arm in _arms(inputs):
        values = off(arm.attend(arm.caches), exact(arm.meant), wanted)
        if load == Load(load.batch, load.context, uneven=load.uneven):
            values["attention_us"] = measuring.graph_us(calls_over(arm.attend, arm.caches), REPLAYS)
            values["attention_floor_us"] = [load.cache_bytes(1) / copy_tb_s / 1e6]
        yield {"arm": arm.name, "case": load.name, "model": MODEL, "values": values}
    torch.cuda.empty_cache()


def calls_over(attend: kernels.Attend, caches: kernels.Caches) -> list[measuring.Call]:
    """Calls round copies of the caches, so that L2 holds little of what one reads."""
    nbytes = sum(cache.nbytes for cache in caches)
    copies = [caches]
    for _ in range(min(-(-APART_BYTES // nbytes), CALLS) - 1):
        copies.append((caches[0].clone(), caches[1].clone()))
    return [partial(attend, copies[call % len(copies)]) for call in range(CALLS)]


def _arms(inputs: Inputs) -> Iterator[Arm]:
    layer = kernels.layer_of("layer", inputs)
    caches = kernels.stored(layer, inputs)
    meant = kernels.meant(inputs, layer, caches)
    made: dict[str, Callable[[], kernels.Attend]] = {
        "paged": lambda: kernels.attend_paged(inputs, layer),
        "xqa": lambda: kernels.attend_xqa(inputs, layer),
        "xqa-bf16-mma": lambda: kernels.attend_xqa(inputs, layer, fp8_mma=False),
        "fa2": lambda: kernels.attend_fa2(inputs, layer, kernels.fa2(inputs, FP8_DTYPE)),
    }
    for name, make in made.items():
        yield Arm(name, make(), caches, meant)
    del caches, meant
    layer = kernels.layer_of(kernels.INT8, inputs)
    caches = kernels.stored(layer, inputs)
    meant = kernels.meant(inputs, layer, caches)
    yield Arm("paged-int8", kernels.attend_paged(inputs, layer), caches, meant)


BENCHMARK = Benchmark(jobs=(Job("decode", None),), measure=measure, limit_s=300.0)
