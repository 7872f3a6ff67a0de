"""What each way to serve would take for one rollout, the fastest first."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from sgl_fp8rl.tools.plan import memory, schedule, speed
from sgl_fp8rl.tools.plan.measured import ON_TWO_GPUS, figures
from sgl_fp8rl.tools.plan.shape import Shape
from sgl_fp8rl.tools.plan.workload import Request, Workload, WorkloadError

TP_SIZES = (1, 2, 4, 8)
"""Of engines, where none is asked for: they stay on one host."""


@dataclass(frozen=True)
class Cluster:
    """What serves.

    Args:
        gpus: all of them; each engine takes ``tp``.
        tp: None for any of ``TP_SIZES``.
        reserved_bytes: what a trainer keeps on each GPU while the engines run.
        fraction: ``mem_fraction_static``; None for what SGLang's estimate leaves.
        chunk: ``chunked_prefill_size``.
    """

    gpu: memory.Gpu
    gpus: int = 1
    tp: int | None = None
    reserved_bytes: float = 0.0
    fraction: float | None = None
    chunk: int = 8192


@dataclass(frozen=True)
class Prediction:
    """Of one arm, by engines of one size."""

    arm: speed.Arm
    tp: int
    ep: int
    engines: int
    fraction: float
    kv_tokens: int
    outcome: schedule.Outcome
    tokens_s: float


def predictions(shape: Shape, workload: Workload, cluster: Cluster) -> list[Prediction]:
    """Every arm, by engines of every size that holds the model and the longest request.

    Raises:
        DoesNotFitError: there is none.
    """
    found = []
    longest = max(request.prompt + request.limit for request in workload.requests)
    largest_cache = 0
    gpu, reserved = cluster.gpu, cluster.reserved_bytes
    times = speed.speed_of(gpu.scale)
    for tp in sizes(shape, cluster):
        engines = cluster.gpus // tp
        share = busiest(workload, engines)
        fraction = cluster.fraction or memory.mem_fraction_static(
            gpu, tp, reserved, cluster.chunk, len(share)
        )
        for arm in speed.ARMS:
            tokens = memory.kv_tokens(gpu, shape, arm, tp, reserved, fraction)
            largest_cache = max(largest_cache, tokens)
            if tokens <= longest:
                continue
            engine = schedule.Engine(arm, shape, times, tokens, cluster.chunk, tp=tp)
            outcome = schedule.simulate(engine, share)
            tokens_s = workload.response_tokens / outcome.seconds
            ep = shape.ep(tp, arm.fp8)
            found.append(Prediction(arm, tp, ep, engines, fraction, tokens, outcome, tokens_s))
    if not found:
        what = (
            f"a request of up to {longest} tokens does not fit: the largest KV cache would hold "
            f"{largest_cache}"
            if largest_cache
            else f"the model does not fit: its weights take "
            f"{shape.weight_bytes(fp8=True) / memory.GIB:.0f} GiB in FP8"
        )
        raise schedule.DoesNotFitError(
            f"{what}; give an engine more GPUs (--gpus, --tp) or memory (--mem-fraction-static, "
            f"--reserved-gib)"
        )
    return found


def sizes(shape: Shape, cluster: Cluster) -> list[int]:
    """GPUs that an engine may have.

    Raises:
        WorkloadError: an engine cannot have as many as were asked for.
    """
    if cluster.tp is None:
        return [tp for tp in TP_SIZES if tp <= cluster.gpus and shape.is_divisible(tp)]
    if not shape.is_divisible(cluster.tp):
        raise WorkloadError(
            f"--tp {cluster.tp} does not divide the model's {shape.heads} heads, {shape.kv_heads} "
            f"KV heads and MLP of {shape.intermediate}; give one that does"
        )
    if cluster.tp > cluster.gpus:
        raise WorkloadError(
            f"--tp {cluster.tp} needs more than --gpus {cluster.gpus}; give it --gpus {cluster.tp}"
        )
    return [cluster.tp]


def best_of_arms(found: Sequence[Prediction]) -> list[Prediction]:
    """The best size of each arm, the best arm first.

    Times leave out communication, which larger engines have more of. So each doubling of an engine
    counts as what steps on two GPUs were measured to take besides, at most.
    """
    missed: float = figures()["errors"][ON_TWO_GPUS]["worst"]

    def seconds(each: Prediction) -> float:
        part: float = (1 - missed) ** log2(each.tp)
        return each.outcome.seconds / part

    best: dict[str, Prediction] = {}
    for each in sorted(found, key=seconds):
        best.setdefault(each.arm.name, each)
    return list(best.values())


def busiest(workload: Workload, engines: int) -> list[Request]:
    """The requests of the engine that has most to generate, where each is given one in turn."""
    shares = [list(workload.requests[first::engines]) for first in range(engines)]
    return max(shares, key=lambda share: sum(request.response for request in share))
