"""Full weight updates on one GPU that trainer and engine share, ours beside stock SGLang's.

The job's process is the trainer and holds the engine. Stock SGLang answers an update when its
copies are queued, not when they are done, so its wall time may be short by the last of them; ours
answers when every kernel has ended.
"""

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks import measuring
from benchmarks.benchmark import LAYERS, Benchmark, Job, Measurement, Option, Run
from benchmarks.engines import keywords, models, stock_push, traffic, weights

DEVICE = "cuda"
MIB = 1 << 20
WARM_UP = 3  # the second finds the weights where they were, and the third plans to map them
WATCHED = 3
"""Updates after the timed ones, during which free memory is looked at; that may slow them."""
NEARLY_ALL = 0.99  # of the payload, so that the kernels hardly wait for the trainer's copies
COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
    "grammar_backend": "none",
    "log_level": "warning",
    "dtype": "bfloat16",
    "attention_backend": "flashinfer",
    "cuda_graph_max_bs_decode": 8,
    "cuda_graph_backend_prefill": "disabled",
    # half of a GPU of 141 GB: the trainer's BF16 weights must fit beside it
    "mem_fraction_static": 0.5,
    "max_total_tokens": 16384,
}

Update = Callable[[int], Any]
Logprobs = Callable[[], tuple[list[float], list[int] | None]]


@dataclass(frozen=True)
class Case:
    """One way to update one model."""

    arm: str
    name: str
    engine: dict[str, Any] = field(default_factory=dict)
    """Keywords of ``sglang.Engine`` besides ``COMMON``."""
    source: str = "bf16"
    """What the trainer holds: "bf16", or "fp8" for codes and scales."""
    target: str = "bf16"
    """What the engine holds its linears in."""
    bucket_bytes: int | None = None
    """Stock only: size of a flattened bucket."""
    mapped: bool | None = None
    """True: the engine must read the trainer's memory in place. False: it must not be able to, so
    the trainer uses expandable segments, which CUDA IPC cannot export. None: either."""
    streamed: bool = False
    """Whether the trainer sends an iterator, whose tensors are made anew as a gather makes them."""
    model: str = "qwen3-8b"

    @property
    def stock(self) -> bool:
        """Whether SGLang runs as it is, without plugins."""
        return self.bucket_bytes is not None


def _fp8rl(
    name: str, source: str, mapped: bool | None, streamed: bool = False, **more: Any
) -> Case:
    engine = {"quantization": "fp8rl", "load_format": "dummy", **more}
    return Case("fp8rl", name, engine, source, "fp8", mapped=mapped, streamed=streamed)


def _stock_fp8(name: str, bucket_bytes: int) -> Case:
    engine = {"load_format": "dummy", **keywords.BLOCK_FP8}
    name = f"from FP8 + scales, {name}"
    return Case("stock-block-fp8", name, engine, "fp8", "fp8", bucket_bytes=bucket_bytes)


_DUMMY = {"load_format": "dummy"}
ALL_IN_ONE = 1 << 40

CASES = (
    Case("stock-bf16", "one bucket", _DUMMY, bucket_bytes=ALL_IN_ONE),
    Case("stock-bf16", "buckets of 2 GiB", _DUMMY, bucket_bytes=2048 * MIB),
    _stock_fp8("one bucket", ALL_IN_ONE),
    _stock_fp8("buckets of 2 GiB", 2048 * MIB),
    _fp8rl("from BF16, mapped", "bf16", mapped=True),
    _fp8rl("from BF16, bucket", "bf16", mapped=False),
    _fp8rl("from BF16, bucket of 4 GiB", "bf16", mapped=False, fp8rl_bucket_bytes=4 << 30),
    _fp8rl("from BF16, streamed", "bf16", mapped=False, streamed=True),
    _fp8rl("from FP8 + scales", "fp8", mapped=None),
)


def measure(case: Case, run: Run) -> list[Measurement]:
    """Start the engine, and update it again and again."""
    import sglang

    copy_tb_s = measuring.copy_tb_s()
    shape = models.written(models.MODELS[case.model], run.folder, run.options["layers"])
    started = time.perf_counter()
    engine = sglang.Engine(model_path=str(run.folder), **COMMON, **case.engine)
    print(f"engine start: {time.perf_counter() - started:.0f} s")
    # after the engine, which must not inherit the allocator's setting
    if case.mapped is False and not case.streamed:
        use_expandable_segments()
    given, tensors = trainer(case, shape)
    if case.stock:
        update = stock_update(engine, given, case)
    else:
        update = streamed_update(engine, given) if case.streamed else our_update(engine, given)
    measured = timed_updates(
        update,
        lambda: weights.renew(tensors),
        lambda: stock_push.probe(engine),
        run.options["updates"],
    )
    engine.shutdown()
    values = values_of(measured, case, list(models.parameters(shape)), copy_tb_s)
    return [{"arm": case.arm, "model": case.model, "case": case.name, "values": values}]


def trainer(case: Case, shape: models.Shape) -> tuple[Any, list[torch.Tensor]]:
    """What the update is given, and the tensors that ``renew`` changes."""
    if case.source == "fp8":
        named = weights.fp8_named(shape, DEVICE)
        return named, [tensor for _, tensor in named]
    module = weights.bf16_module(shape, DEVICE)
    by_name = case.stock or case.streamed
    return (weights.hf_named(module) if by_name else module), list(module.parameters())


def use_expandable_segments() -> None:
    """Take this process's next allocations from expandable segments, which cannot be exported."""
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    if not any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()):
        raise RuntimeError("the allocator did not take expandable segments; use another torch")


def stock_update(engine: Any, named: weights.Named, case: Case) -> Update:
    """Stock SGLang's fastest colocated path: flattened buckets over CUDA IPC."""
    assert case.bucket_bytes is not None
    planned = list(stock_push.buckets(named, case.bucket_bytes))

    def update(version: int) -> None:
        with stock_push.session(engine):
            for tensors, last in planned:
                stock_push.send(engine, tensors, last, f"update {version}")

    return update


def our_update(engine: Any, given: Any) -> Update:
    """``trainer_bridge.update``."""
    import trainer_bridge

    return lambda version: trainer_bridge.update(given, engine, version=version)


def streamed_update(engine: Any, named: weights.Named) -> Update:
    """``trainer_bridge.update`` of an iterator that copies each tensor when it is asked for."""
    import trainer_bridge

    announce = [(name, tensor.dtype, tensor.shape) for name, tensor in named]

    def update(version: int) -> Any:
        gathered = ((name, tensor.clone()) for name, tensor in named)
        return trainer_bridge.update(gathered, engine, version=version, announce=announce)

    return update


@dataclass(frozen=True)
class Measured:
    """Timed updates."""

    times_ms: list[float]
    results: list[Any]
    """What the update returned: ``trainer_bridge.UpdateResult``, or None of stock SGLang."""
    extra_gib: list[float]
    """Extra memory: what is free before the first update, less the least that is free during later
    ones, less what the first generation takes for itself. A bucket that is kept counts."""


def timed_updates(
    update: Update,
    renew: Callable[[], None],
    logprobs: Logprobs,
    updates: int,
    meet: Callable[[], object] = lambda: None,
) -> Measured:
    """Update to new values: warm-up, ``updates`` timed ones, and a few with an eye on memory.

    Args:
        meet: waits for the other ranks of the trainer, before the clock starts.
    """
    torch.cuda.empty_cache()
    free = measuring.free_bytes()
    versions = itertools.count()

    def one() -> tuple[float, Any]:
        renew()
        version = next(versions)
        return measuring.timed(lambda: update(version), meet)

    one()
    before = measuring.free_bytes()
    first, _ = logprobs()
    free -= before - measuring.free_bytes()
    for _ in range(WARM_UP - 1):
        one()
    timed = [one() for _ in range(updates)]
    extra = []
    for _ in range(WATCHED):
        renew()
        measuring.settle()
        meet()
        with measuring.LeastFree() as least:
            update(next(versions))
        extra.append((free - least.bytes) / 2**30)
    last, served = logprobs()
    version = next(versions) - 1
    if not all(map(math.isfinite, last)):
        raise RuntimeError("the engine's logprobs are not finite after the last update")
    if last == first:
        raise RuntimeError("the updates changed no logprob: the engine kept its first weights")
    if served is not None and set(served) != {version}:
        raise RuntimeError(f"the engine generated with version {served}, not with {version}")
    return Measured([ms for ms, _ in timed], [result for _, result in timed], extra)


def values_of(
    measured: Measured, case: Case, parameters: list[models.Parameter], copy_tb_s: float
) -> dict[str, list[float]]:
    """The values of each metric."""
    ours = [] if case.stock else measured.results
    mapped = [result.mapped_bytes for result in ours] or [0]
    if (case.mapped and not all(mapped)) or (case.mapped is False and any(mapped)):
        raise RuntimeError(f"'{case.name}' read {min(mapped)} to {max(mapped)} bytes in place")
    # our trainer side quantizes into the bucket, so that it holds what the engine keeps
    bucket = None if all(mapped) else case.source if case.stock else case.target
    payload = traffic.payload_bytes(parameters, bucket or case.source)
    if any(result.bytes != payload for result in ours):
        raise RuntimeError(f"an update carried {ours[0].bytes} bytes, the model has {payload}")
    moved = traffic.update_traffic(parameters, case.source, case.target, bucket)
    values = {
        "update_wall_ms": measured.times_ms,
        "update_floor_ms": [traffic.floor_ms(moved, copy_tb_s)],
        "copy_tb_s": [copy_tb_s],
    }
    gpu_ms = [1e3 * result.gpu_seconds for result in ours if result.gpu_seconds is not None]
    if gpu_ms:
        values["update_gpu_ms"] = gpu_ms
    if gpu_ms and case.source == "bf16" and min(mapped) / payload > NEARLY_ALL:
        values["quantize_copy_fraction"] = [moved / ms / 1e9 / copy_tb_s for ms in gpu_ms]
    return values | stages(ours) | {"peak_extra_gib": measured.extra_gib}


def stages(results: list[Any]) -> dict[str, list[float]]:
    """Milliseconds of each stage of our updates."""
    return {
        f"update_{stage}_ms": [1e3 * result.seconds[stage] for result in results]
        for stage in (results[0].seconds if results else ())
        if stage != "total"
    }


BENCHMARK = Benchmark(
    jobs=tuple(
        Job(
            f"{model}/{case.arm}/{case.name}",
            replace(case, model=model),
            stock=case.stock,
        )
        for model in models.MODELS
        for case in CASES
        # another 61 GB beside trainer and engine
        if (model, case.arm, case.bucket_bytes) != ("qwen3-30b-a3b", "stock-bf16", ALL_IN_ONE)
    ),
    measure=measure,
    limit_s=300.0,
    options=(Option("updates", "timed updates of a job", default=10), LAYERS),
)
