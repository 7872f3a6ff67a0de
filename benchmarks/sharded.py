"""Full updates from a trainer sharded over several GPUs to an engine over the same GPUs.

Each rank of the trainer is a process with a GPU of its own; the first is the job's process and
holds the engine. FSDP2 shards the parameters by rows. Stock SGLang is sent what frameworks send it:
each rank gathers every parameter, all gathers of a bucket queued at once, flattens the bucket and
passes it to the engine's rank on its GPU over CUDA IPC.
"""

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from benchmarks import update
from benchmarks.benchmark import LAYERS, Benchmark, Job, Measurement, Option, Run
from benchmarks.engines import models, stock_push, weights
from benchmarks.engines.keywords import NCCL_ALONE, NO_MULTICAST

DEVICE, BACKEND = "cuda", "cpu:gloo,cuda:nccl"
GIB = 1 << 30
ENGINE: dict[str, Any] = {
    **update.COMMON,
    "load_format": "dummy",
    **NCCL_ALONE,
    # the trainer's shards and stock SGLang's buckets must fit beside it
    "mem_fraction_static": 0.35,
}


@dataclass(frozen=True)
class Case:
    """One engine, and what the trainer holds."""

    arm: str
    model: str
    dtype: torch.dtype = torch.bfloat16
    buckets: tuple[int, ...] = ()
    """Stock only: the least bytes of a bucket, each size a case of its own."""

    @property
    def stock(self) -> bool:
        """Whether SGLang runs as it is, without plugins."""
        return bool(self.buckets)


def measure(case: Case, run: Run) -> list[Measurement]:
    """Start the engine and the other ranks, and update again and again.

    Raises:
        RuntimeError: shards were not read in place, or the engine does not serve the last weights.
    """
    import sglang

    shape = models.SHAPES[case.model]
    shape = replace(shape, layers=run.options["layers"] or shape.layers)
    models.save_config(shape, run.folder)
    gpus = run.options["gpus"]
    keywords = ENGINE | {"tp_size": gpus, "ep_size": gpus if shape.experts else 1}
    if not case.stock:
        keywords["quantization"] = "fp8rl"
    engine = sglang.Engine(model_path=str(run.folder), **keywords)
    spawn = multiprocessing.get_context("spawn")
    arguments = gpus, str(run.folder / "store"), case, shape, run.options["updates"]
    others = [
        # they end with this process where it fails, rather than wait for it
        spawn.Process(target=train, args=(rank, *arguments), daemon=True)
        for rank in range(1, gpus)
    ]
    for process in others:
        process.start()
    found = train(0, *arguments, engine)
    for process in others:
        process.join()
    engine.shutdown()
    return [{"arm": case.arm, "model": case.model} | each for each in found]


def train(
    rank: int,
    ranks: int,
    store: str,
    case: Case,
    shape: models.Shape,
    updates: int,
    engine: Any = None,
) -> list[Measurement]:
    """One rank of the trainer: case and values of each way to update.

    Args:
        engine: on the first rank.
    """
    torch.cuda.set_device(rank)
    dist.init_process_group(BACKEND, init_method=f"file://{store}", rank=rank, world_size=ranks)
    module = sharded(shape, case.dtype, ranks)
    shards = [parameter.to_local() for _, parameter in parameters(module)]
    found = []
    for bucket in case.buckets or (None,):
        if bucket is None:
            step = update.our_update(engine, module)
            name = f"from {str(case.dtype).removeprefix('torch.')} shards"
        else:
            step = stock_update(module, engine, bucket)
            name = f"buckets of {bucket / GIB:g} GiB"
        measured = update.timed_updates(
            step, lambda: renew(shards), lambda: on_all(update.logprobs, engine), updates, meet
        )
        extra: list[Any] = [None] * ranks
        dist.all_gather_object(extra, measured.extra_gib)
        found.append({"case": name, "values": values_of(measured, case, extra)})
    dist.destroy_process_group()
    return found


def sharded(shape: models.Shape, dtype: torch.dtype, ranks: int) -> nn.Module:
    """The model as FSDP2 holds it: never whole on one GPU."""
    mesh = init_device_mesh(DEVICE, (ranks,))
    module = weights.bf16_module(shape, "meta").to(dtype)
    for layer in module.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module.to_empty(device=DEVICE)


def parameters(module: nn.Module) -> list[tuple[str, DTensor]]:
    """Each with its name, as ``fully_shard`` left it."""
    return [(n, p) for n, p in module.named_parameters() if isinstance(p, DTensor)]


def renew(shards: list[torch.Tensor]) -> None:
    """New random values in place, as an optimizer step would write them."""
    for shard in shards:
        weights.draw(shard)


def meet() -> None:
    """Wait for all ranks."""
    dist.all_reduce(torch.zeros(1))


def on_all(ask: Any, engine: Any) -> Any:
    """What the first rank's engine answers, on every rank."""
    answers = [None if engine is None else ask(engine)]
    dist.broadcast_object_list(answers)
    return answers[0]


def stock_update(module: nn.Module, engine: Any, bucket_bytes: int) -> update.Update:
    """Gather a bucket at a time, and pass each rank's copy to the engine's rank on its GPU."""

    def step(version: int) -> None:
        for bucket, last in gathered_buckets(module, bucket_bytes):
            mine = stock_push.payload(bucket)
            payloads: list[Any] | None = None if engine is None else [None] * dist.get_world_size()
            dist.gather_object(mine, payloads)
            if payloads is not None:
                stock_push.send_payloads(engine, payloads, last, f"update {version}")
            meet()  # this rank's bucket is read until the engine has answered

    return step


def gathered_buckets(module: nn.Module, bucket_bytes: int) -> Iterator[tuple[weights.Named, bool]]:
    """Whole tensors under their HF names, a bucket at a time, and whether it is the last."""
    pending: list[tuple[str, torch.Tensor]] = []
    remaining = parameters(module)
    while remaining:
        name, parameter = remaining.pop(0)
        whole = [Replicate()] * parameter.device_mesh.ndim
        # the gathers of a bucket are queued, and waited for together
        gathered = parameter.redistribute(placements=whole, async_op=True).to_local()
        pending.append((name, gathered))
        if not remaining or stock_push.sum_bytes(pending) >= bucket_bytes:
            bucket = [
                (hf_name, cut(tensor))
                for name, tensor in pending
                for hf_name, cut in weights.split(module, name, tensor)
            ]
            pending = []
            yield bucket, not remaining


def values_of(
    measured: update.Measured, case: Case, extra: list[list[float]]
) -> dict[str, list[float]]:
    """The values of each metric.

    Args:
        extra: extra memory of each rank's GPU in each of the updates that were watched.

    Raises:
        RuntimeError: ours gathered something.
    """
    values = {
        "update_wall_ms": measured.times_ms,
        "peak_extra_gib": [max(gpus) for gpus in zip(*extra, strict=True)],
    }
    if case.stock:
        return values
    results = measured.results
    if any(result.mapped_bytes != result.bytes for result in results):
        raise RuntimeError(f"{results[0].bytes - results[0].mapped_bytes} bytes were gathered")
    values["update_gpu_ms"] = [1e3 * result.gpu_seconds for result in results]
    return values | update.stages(results)


CASES = (
    Case("fp8rl", "qwen3-8b"),
    Case("stock-bf16", "qwen3-8b", buckets=(GIB // 2, 2 * GIB, 16 * GIB)),
    Case("fp8rl", "qwen3-32b"),
    Case("stock-bf16", "qwen3-32b", buckets=(2 * GIB,)),
    Case("fp8rl", "qwen3-30b-a3b"),
    Case("stock-bf16", "qwen3-30b-a3b", buckets=(2 * GIB,)),
    Case("fp8rl-fp32", "qwen3-8b", dtype=torch.float32),
)
BENCHMARK = Benchmark(
    jobs=tuple(
        Job(f"{case.model}/{case.arm}", case, stock=case.stock, environ=NO_MULTICAST)
        for case in CASES
    ),
    measure=measure,
    limit_s=300.0,
    options=(
        Option("updates", "timed updates of a case", default=10),
        Option("gpus", "GPUs of trainer and engine", default=2),
        LAYERS,
    ),
)
