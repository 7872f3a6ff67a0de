"""The FP8 KV cache on one GPU, ours beside stock SGLang's.

attention, attention-bf16-mma   error of decode attention against float64, time of a call
engine-*                        capacity, prefill and decode of Qwen3-8B
logprobs-*                      error against a BF16 KV cache, 6 layers
update                          updates with KV scales and without
"""

from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import measuring
from benchmarks.benchmark import LAYERS, Benchmark, Job, Measurement, Run
from benchmarks.engines import models, serving
from benchmarks.engines.keywords import (
    BLOCK_FP8,
    ENGINE,
    FLASHINFER,
    FULL,
    OURS,
    OURS_KV8,
    SMALL,
    STOCK_XQA,
    is_stock,
)
from benchmarks.kv import attention, logprobs, updates

MODEL = "qwen3-8b"
LOADS = (serving.Load(128, 512, 256), serving.Load(64, 8192, 256))


@dataclass(frozen=True)
class Case:
    """What one process measures."""

    name: str
    kind: str
    """"attention", "engine", "logprobs" or "update"."""
    arm: str
    engine: dict[str, Any] = field(default_factory=dict)
    """Keywords of ``sglang.Engine`` besides ``ENGINE``."""
    trainer_scales: bool = False
    """Whether the trainer measures KV scales and sends them with each update."""
    by_default: bool = True

    @property
    def keywords(self) -> dict[str, Any]:
        """All keywords of ``sglang.Engine``."""
        return ENGINE | (FULL if self.kind == "engine" else SMALL) | self.engine


def _engine(arm: str, engine: dict[str, Any], by_default: bool = True) -> Case:
    name = f"engine-{arm}".replace(", ", "-").replace(" ", "-")
    return Case(name, "engine", arm, engine, by_default=by_default)


def _scheme(name: str, engine: dict[str, Any], trainer_scales: bool = False) -> Case:
    arm = f"fp8rl-kv8, {name.replace('-', ' ')} scales"
    return Case(f"logprobs-{name}", "logprobs", arm, engine, trainer_scales)


REFERENCE = Case("logprobs-bf16", "logprobs", "fp8rl, BF16 KV", {**OURS, **FLASHINFER})
"""What the others' logprobs are compared with; it runs after them, for it scores their samples."""

CASES = (
    Case("attention", "attention", "attention kernels"),
    Case("attention-bf16-mma", "attention", "xqa-bf16-mma"),
    _engine("stock-bf16", FLASHINFER),
    _engine("stock-bf16-kv8-xqa", STOCK_XQA, by_default=False),
    _engine("stock-block-fp8-kv8-xqa", {**BLOCK_FP8, **STOCK_XQA}),
    _engine("fp8rl", {**OURS, **FLASHINFER}),
    _engine("fp8rl-kv8", OURS_KV8),
    _scheme("unit", {**OURS_KV8, "fp8rl_kv_scheme": "unit"}),
    _scheme("engine", {**OURS_KV8, "fp8rl_kv_scheme": "engine"}),
    _scheme("trainer", {**OURS_KV8, "fp8rl_kv_scheme": "trainer"}, trainer_scales=True),
    REFERENCE,
    Case("update", "update", "fp8rl-kv8", OURS_KV8),
)


def measure(case: Case, run: Run) -> list[Measurement]:
    """Measure the case. The reference, which runs last, returns every scheme's logprobs.

    Raises:
        RuntimeError: the case did not do what its name says.
    """
    if case.kind == "attention":
        bf16_mma = case.arm == "xqa-bf16-mma"
        return attention.measurements(bf16_mma, measuring.copy_tb_s())
    shape = models.MODELS[MODEL]
    if case.kind == "logprobs":
        shape = logprobs.cut(shape)
    elif run.options["layers"] is not None:
        shape = replace(shape, layers=run.options["layers"])
    models.save_config(shape, run.folder)
    if case.kind == "logprobs":
        reference = case == REFERENCE
        work = logprobs.Work(case.arm, case.keywords, case.trainer_scales, reference)
        return logprobs.measure(work, shape, run)
    if case.kind == "update":
        return serving.measurements(
            case.arm, MODEL, updates.measure(case.keywords, shape, str(run.folder))
        )
    values = serving.speed(case.keywords, shape, str(run.folder), LOADS)
    return serving.measurements(case.arm, MODEL, values)


BENCHMARK = Benchmark(
    jobs=tuple(
        Job(
            case.name,
            case,
            stock=case.kind == "engine" and is_stock(case.engine),
            by_default=case.by_default,
            needs=(REFERENCE.name,) if case.kind == "logprobs" and case != REFERENCE else (),
        )
        for case in CASES
    ),
    measure=measure,
    limit_s=240.0,
    options=(LAYERS,),
)
