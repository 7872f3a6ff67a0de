"""Decode of models whose layer sizes on a rank are not multiples of 128, beside stock SGLang's.

  qwen2.5-0.5b, TP 2     q, k and v are stacked off a block; o_proj has 448 columns
  qwen3-30b-a3b, TP 4    experts have 192 channels on a rank

Every format of ours serves them. Stock SGLang refuses them in block FP8; its own online FP8
quantizes the weights that it loads, with a scale for each row.
"""

from dataclasses import replace
from typing import Any

from benchmarks.benchmark import LAYERS, Benchmark, Job, Measurement, Run
from benchmarks.engines import models, serving
from benchmarks.engines.keywords import (
    ENGINE,
    FULL,
    NO_MULTICAST,
    ONLINE_FP8,
    OURS,
    is_stock,
)
from benchmarks.engines.serving import Load
from benchmarks.rollout import Arm

ARMS: dict[str, dict[str, Any]] = {
    "stock-bf16": {},
    "stock-fp8": ONLINE_FP8,
    "fp8rl-pad": OURS,
    "fp8rl-ragged-channel": {**OURS, "fp8rl_ragged": "channel"},
    "fp8rl-ragged-bf16": {**OURS, "fp8rl_ragged": "bf16"},
    "fp8rl-channel": {**OURS, "fp8rl_format": "channel-fp8"},
    "fp8rl-int8": {**OURS, "fp8rl_format": "int8"},
}
MODELS = {
    "qwen2.5-0.5b": models.Shape(
        hidden=896,
        intermediate=4864,
        layers=24,
        heads=14,
        kv_heads=2,
        head_dim=64,
        is_qwen2=True,
    ),
    "qwen3-30b-a3b": models.MODELS["qwen3-30b-a3b"],
}
RANKS = {"qwen2.5-0.5b": 2, "qwen3-30b-a3b": 4}
ROOM = {"mem_fraction_static": 0.8}
"""It leaves memory to send stock engines their weights on GPUs of 80 GB."""
LOADS = (Load(32, 512, 128), Load(256, 512, 128))


def measure(arm: Arm, run: Run) -> list[Measurement]:
    """KV capacity, and prefill and decode of each load."""
    shape = MODELS[arm.model]
    shape = replace(shape, layers=run.options["layers"] or shape.layers)
    models.save_config(shape, run.folder)
    keywords = arm.keywords(batches=[load.batch for load in LOADS]) | ROOM
    loads = [load for load in LOADS if run.wants(load.name)]
    values = serving.speed(keywords, shape, str(run.folder), loads)
    return serving.measurements(arm.name, f"{arm.model}, TP {arm.tp}", values)


BENCHMARK = Benchmark(
    jobs=tuple(
        Job(
            f"{model}/{name}",
            Arm(name, engine, model=model, tp=tp),
            is_stock(engine),
            environ=NO_MULTICAST,
        )
        for model, tp in RANKS.items()
        for name, engine in ARMS.items()
    ),
    measure=measure,
    limit_s=300.0,
    options=(LAYERS,),
    facts={"engine": ENGINE | FULL | ROOM, "arms": ARMS},
)
