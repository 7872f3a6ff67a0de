"""Full updates from a trainer sharded over several GPUs to engines on the same GPUs, or on others.

Each rank of the trainer is a process with a GPU of its own; the first is the job's process and
holds the engine, or updates several servers. FSDP2 shards the parameters by rows. Stock SGLang is
sent what frameworks send it: each rank gathers every parameter, all gathers of a bucket queued at
once, flattens the bucket and passes it to the engine's rank on its GPU over CUDA IPC. To an engine
on other GPUs the first rank broadcasts it. Ours reads BF16 on its own GPUs; to other GPUs, and to
several engines, travel the codes that the trainer's ranks make.
"""

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks import update
from benchmarks.benchmark import LAYERS, Benchmark, Job, Measurement, Option, Run
from benchmarks.engines import models, stock_push, weights
from benchmarks.engines.keywords import NCCL_ALONE, NO_MULTICAST
from benchmarks.engines.server import Server
from benchmarks.engines.stock_broadcast import BroadcastGroup
from benchmarks.sharded_stock import meet, over_ipc, parameters, stock_update

DEVICE, BACKEND, GPU_BACKEND = "cuda", "cpu:gloo,cuda:nccl", "nccl"
GIB = 1 << 30
ENGINE: dict[str, Any] = {
    **update.COMMON,
    "load_format": "dummy",
    **NCCL_ALONE,
    # the trainer's shards and stock SGLang's buckets must fit beside it
    "mem_fraction_static": 0.35,
}
WHOLE_ON_EACH = 0.55
"""The same, where a GPU holds a whole model: 31 GB of 30B-A3B, and a quarter of the shards."""
ALONE = 0.6
"""The same, where the trainer is on other GPUs: 31 GB of BF16 on each of two."""
STORE = "tcp://127.0.0.1:20900"
"""Of the trainer's ranks, a server as torchrun's: the lock of a file slows ranks that poll."""
PORT, PORTS = 21000, 1000
"""Of the first server, and from one to the next: SGLang takes others behind each."""

SAME, OTHERS, EACH = "", "to other GPUs", "to an engine on each GPU"
"""Where engines are: one over the trainer's GPUs, one over as many others, one on each."""


@dataclass(frozen=True)
class Case:
    """The engines, and what the trainer holds."""

    arm: str
    model: str
    place: str = SAME
    dtype: torch.dtype = torch.bfloat16
    buckets: tuple[int, ...] = ()
    """Stock only: the least bytes of a bucket, each size a case of its own."""

    @property
    def stock(self) -> bool:
        """Whether SGLang runs as it is, without plugins."""
        return bool(self.buckets)

    def engines(self, gpus: int, shape: models.Shape) -> list[dict[str, Any]]:
        """Keywords of each ``sglang.Engine``, given the GPUs of the trainer."""
        common = ENGINE | ({} if self.stock else {"quantization": "fp8rl"})
        if self.place == EACH:
            each = common | {"mem_fraction_static": WHOLE_ON_EACH}
            return [each | {"base_gpu_id": gpu} for gpu in range(gpus)]
        ranks: dict[str, Any] = {"tp_size": gpus, "ep_size": gpus if shape.experts else 1}
        if self.place == OTHERS:
            ranks |= {"mem_fraction_static": ALONE, "base_gpu_id": gpus}
        return [common | {"base_gpu_id": 0} | ranks]


def measure(case: Case, run: Run) -> list[Measurement]:
    """Start the engines and the other ranks, and update again and again."""
    shape = models.written(models.SHAPES[case.model], run.folder, run.options["layers"])
    gpus = run.options["gpus"]
    if (needed := gpus * (2 if case.place == OTHERS else 1)) > torch.cuda.device_count():
        raise ValueError(f"{gpus} ranks {case.place} need {needed} GPUs; name other jobs by --only")
    engines = started(case.engines(gpus, shape), run)
    spawn = multiprocessing.get_context("spawn")
    arguments = gpus, STORE, case, shape, run.options["updates"]
    others = [
        # they end with this process where it fails, rather than wait for it
        spawn.Process(target=train, args=(rank, *arguments), daemon=True)
        for rank in range(1, gpus)
    ]
    for process in others:
        process.start()
    found = train(0, *arguments, engines)
    for process in others:
        process.join()
    for engine in engines:
        engine.shutdown()
    return [{"arm": case.arm, "model": case.model} | each for each in found]


def started(each: list[dict[str, Any]], run: Run) -> list[Any]:
    """Engines by their keywords: one is of this process, several are servers, which start and are
    updated side by side."""
    import sglang

    if len(each) == 1:
        return [sglang.Engine(model_path=str(run.folder), **each[0])]
    servers = [
        Server(run.folder, keywords, PORT + PORTS * number, run.log)
        for number, keywords in enumerate(each)
    ]
    for server in servers:
        server.await_start()
    return servers


def train(
    rank: int,
    ranks: int,
    store: str,
    case: Case,
    shape: models.Shape,
    updates: int,
    engines: list[Any] | None = None,
) -> list[Measurement]:
    """One rank of the trainer, the first of which has the engines: case and values of each way to
    update."""
    torch.cuda.set_device(rank)
    dist.init_process_group(BACKEND, init_method=store, rank=rank, world_size=ranks)
    module = sharded(shape, case.dtype, ranks)
    shards = [parameter.to_local() for _, parameter in parameters(module)]
    found = []
    for name, step in steps(case, module, ranks, engines):
        measured = update.timed_updates(
            step, lambda: renew(shards), lambda: on_all(logprobs, engines), updates, meet
        )
        extra: list[Any] = [None] * ranks
        dist.all_gather_object(extra, measured.extra_gib)
        name = ", ".join(filter(None, (name, case.place)))
        found.append({"case": name, "values": values_of(measured, case, extra)})
    dist.destroy_process_group()
    return found


def steps(
    case: Case, module: nn.Module, ranks: int, engines: list[Any] | None
) -> Iterator[tuple[str, update.Update]]:
    """Each way to update, with its name."""
    engine = None if engines is None else engines[0]
    if not case.stock:
        several = engines is not None and len(engines) > 1
        given = [each.address for each in engines or ()] if several else engine
        dtype = str(case.dtype).removeprefix("torch.")
        what = "shards" if case.place == SAME else "shards as codes"
        yield f"from {dtype} {what}", update.our_update(given, module)
        return
    group = None
    if case.place == OTHERS and engine is not None:
        group = BroadcastGroup(engine, ranks, GPU_BACKEND)
    send = over_ipc(engine)
    if case.place == OTHERS:  # by the first rank, which alone has a group
        send = group.send if group is not None else lambda *_: None
    for bucket in case.buckets:
        yield f"buckets of {bucket / GIB:g} GiB", stock_update(engine, module, send, bucket)
    if group is not None:
        group.close()


def sharded(shape: models.Shape, dtype: torch.dtype, ranks: int) -> nn.Module:
    """The model as FSDP2 holds it: never whole on one GPU."""
    mesh = init_device_mesh(DEVICE, (ranks,))
    module = weights.bf16_module(shape, "meta").to(dtype)
    for layer in module.get_submodule("model.layers").children():
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module.to_empty(device=DEVICE)


def renew(shards: list[torch.Tensor]) -> None:
    """New random values in place, as an optimizer step would write them."""
    for shard in shards:
        weights.draw(shard)


def on_all(ask: Any, engines: list[Any] | None) -> Any:
    """What the first rank's engines answer, on every rank."""
    answers = [None if engines is None else ask(engines)]
    dist.broadcast_object_list(answers)
    return answers[0]


def logprobs(engines: list[Any]) -> tuple[list[float], list[int] | None]:
    """Of engines that all serve the same."""
    first, *others = map(stock_push.probe, engines)
    if any(each != first for each in others):
        raise RuntimeError("the engines do not serve the same weights")
    return first


def values_of(
    measured: update.Measured, case: Case, extra: list[list[float]]
) -> dict[str, list[float]]:
    """The values of each metric.

    Args:
        extra: extra memory of each rank's GPU in each of the updates that were watched.
    """
    values = {"update_wall_ms": measured.times_ms, "trainer_gpus": [float(len(extra))]}
    if case.place != OTHERS:  # where the engine's GPUs are not looked at
        values["peak_extra_gib"] = [max(gpus) for gpus in zip(*extra, strict=True)]
    if case.stock:
        return values
    results = measured.results
    if any(result.mapped_bytes != result.bytes for result in results):
        raise RuntimeError(f"{results[0].bytes - results[0].mapped_bytes} bytes were gathered")
    if ("quantize" in results[0].seconds) != (case.place != SAME and len(extra) > 1):
        raise RuntimeError("codes travelled where BF16 should have, or the other way round")
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
    Case("fp8rl", "qwen3-8b", OTHERS),
    Case("stock-bf16", "qwen3-8b", OTHERS, buckets=(2 * GIB,)),
    Case("fp8rl", "qwen3-30b-a3b", OTHERS),
    Case("stock-bf16", "qwen3-30b-a3b", OTHERS, buckets=(2 * GIB,)),
    Case("fp8rl", "qwen3-30b-a3b", EACH),
)
BENCHMARK = Benchmark(
    jobs=tuple(
        Job(
            "/".join(filter(None, (case.model, case.arm, case.place))),
            case,
            stock=case.stock,
            by_default=case.place == SAME,
            environ=NO_MULTICAST,
        )
        for case in CASES
    ),
    measure=measure,
    limit_s=300.0,
    options=(
        Option("updates", "timed updates of a case", default=10),
        Option("gpus", "GPUs of the trainer", default=2),
        LAYERS,
    ),
)
