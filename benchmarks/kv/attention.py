"""Attention error and decode time of each kernel over FP8 KV, without an engine."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import measuring
from benchmarks.benchmark import Benchmark, Job, Measurement, Run
from benchmarks.kv import attention_kernels as kernels
from benchmarks.kv.attention_inputs import Inputs, Load, draw, errors, exact
from sgl_fp8rl.ops.reference import FP8_DTYPE

MODEL = "qwen3-8b"
LOADS = tuple(
    Load(batch, context, beyond)
    for context in (8192, 32768)
    for batch in (8, 64)
    for beyond in (False, True)
)
DEVICE = "cuda"
REPLAYS = 10
CALLS = 8
"""Of a graph; its replay is timed."""
APART_BYTES = 1 << 30
"""Calls of a graph go round so much cache, many times a GPU's L2."""

Attends = dict[tuple[str, str], tuple[kernels.Caches, Callable[[], kernels.Attend]]]
"""By kernel and scheme: caches, and what makes the function that attends to them."""


def measurements(bf16_mma: bool, copy_tb_s: float) -> list[Measurement]:
    """One measurement a load, kernel and scheme.

    Args:
        bf16_mma: XQA's BF16 MMA variant instead of everything else.
    """
    made: list[Measurement] = []
    for load in LOADS:
        inputs = draw(load, DEVICE)
        wanted = exact(inputs)
        for (kernel, scheme), (caches, make) in arms(inputs, bf16_mma).items():
            attend = make()
            values = errors(attend(caches), wanted)
            if not all(map(math.isfinite, values["kv_error"])):
                raise RuntimeError(f"{kernel} at {scheme} scales gave no numbers at {load.name}")
            if not load.beyond:  # values do not change the time
                nbytes = load.cache_bytes(caches[0].element_size())
                values["attention_us"] = times_us(attend, caches)
                values["attention_floor_us"] = [nbytes / copy_tb_s / 1e6]
            arm = f"{kernel}, {scheme} scales" if scheme else kernel
            made.append({"arm": arm, "case": load.name, "model": MODEL, "values": values})
        del inputs, wanted
        torch.cuda.empty_cache()
    made[0]["values"]["copy_tb_s"] = [copy_tb_s]
    return made


def arms(inputs: Inputs, bf16_mma: bool) -> Attends:
    """Every kernel and scheme of one process."""
    found: Attends = {}
    fp8 = None if bf16_mma else kernels.fa2(inputs, FP8_DTYPE)
    for scheme in kernels.SCHEMES:
        layer = kernels.layer_of(scheme, inputs)
        caches = kernels.stored(layer, inputs)
        if bf16_mma:
            found["xqa-bf16-mma", scheme] = caches, _xqa(inputs, layer, fp8_mma=False)
            continue
        if scheme == "unit":
            found["stock-fa2-bf16", ""] = (
                kernels.placed(inputs),
                lambda: kernels.attend_bf16(inputs),
            )
            found["stock-xqa", scheme] = caches, lambda: kernels.attend_stock_xqa(inputs)
        found["fa2", scheme] = caches, _fa2(inputs, layer, fp8)
        found["xqa", scheme] = caches, _xqa(inputs, layer, fp8_mma=True)
        found["paged", scheme] = caches, partial(kernels.attend_paged, inputs, layer)
    return found


def _fa2(inputs: Inputs, layer: Any, run: Any) -> Callable[[], kernels.Attend]:
    return lambda: kernels.attend_fa2(inputs, layer, run)


def _xqa(inputs: Inputs, layer: Any, *, fp8_mma: bool) -> Callable[[], kernels.Attend]:
    return lambda: kernels.attend_xqa(inputs, layer, fp8_mma=fp8_mma)


def times_us(attend: kernels.Attend, caches: kernels.Caches) -> list[float]:
    """Microseconds of a call, from each replay of a CUDA graph of ``CALLS``."""
    return measuring.graph_us(calls_over(attend, caches), REPLAYS)


def calls_over(attend: kernels.Attend, caches: kernels.Caches) -> list[measuring.Call]:
    """``CALLS`` calls round copies of the caches, so that L2 holds little of what one reads."""
    nbytes = sum(cache.nbytes for cache in caches)
    copies = [caches]
    for _ in range(min(-(-APART_BYTES // nbytes), CALLS) - 1):
        copies.append((caches[0].clone(), caches[1].clone()))
    return [partial(attend, copies[call % len(copies)]) for call in range(CALLS)]


@dataclass(frozen=True)
class Variant:
    """Which kernels one process runs."""

    bf16_mma: bool
    """XQA's with products in BF16, instead of all others."""


def measure(variant: Variant, run: Run) -> list[Measurement]:
    """All loads."""
    return measurements(variant.bf16_mma, measuring.copy_tb_s())


BENCHMARK = Benchmark(
    (Job("all", Variant(False)), Job("bf16-mma", Variant(True))), measure, limit_s=240.0
)
