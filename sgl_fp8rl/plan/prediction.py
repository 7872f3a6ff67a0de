"""What each way to serve would take for one rollout, the fastest first."""

from dataclasses import dataclass

from sgl_fp8rl.plan import gemms, memory, schedule, speed
from sgl_fp8rl.plan.shape import Shape
from sgl_fp8rl.plan.workload import Request, Workload

MOST_TP = 8
LONGEST, LARGEST = 30000, 1024
"""Tokens of a sequence, and running requests, up to which times were measured."""


@dataclass(frozen=True)
class Cluster:
    """What serves.

    Args:
        gpus: all of them; each engine takes ``tp``.
        tp: None for the smallest that holds the weights and one request.
        reserved_bytes: what a trainer keeps on each GPU while the engines run.
        fraction: ``mem_fraction_static``.
        chunk: ``chunked_prefill_size``.
    """

    gpu: memory.Gpu
    gpus: int = 1
    tp: int | None = None
    reserved_bytes: float = 0.0
    fraction: float = 0.88
    chunk: int = 8192


@dataclass(frozen=True)
class Prediction:
    """Of one arm."""

    arm: speed.Arm
    tp: int
    engines: int
    kv_tokens: int
    outcome: schedule.Outcome
    tokens_s: float


def predictions(shape: Shape, workload: Workload, cluster: Cluster) -> list[Prediction]:
    """Every arm that the model fits into, the fastest first."""
    found = []
    for arm in speed.ARMS:
        tp = cluster.tp or smallest_tp(shape, arm, workload, cluster)
        if tp is None or tp > cluster.gpus or shape.heads % tp:
            continue
        tokens = memory.kv_tokens(
            cluster.gpu, shape, arm, tp, cluster.reserved_bytes, cluster.fraction
        )
        engines = cluster.gpus // tp
        engine = schedule.Engine(
            arm, shape, speed.speed_of(cluster.gpu.scale), tokens, cluster.chunk, tp=tp
        )
        try:
            outcome = schedule.simulate(engine, busiest(workload, engines))
        except schedule.DoesNotFitError:
            continue
        tokens_s = workload.response_tokens / outcome.seconds
        found.append(Prediction(arm, tp, engines, tokens, outcome, tokens_s))
    return sorted(found, key=lambda each: each.outcome.seconds)


def smallest_tp(shape: Shape, arm: speed.Arm, workload: Workload, cluster: Cluster) -> int | None:
    """GPUs of an engine whose KV cache holds the longest request; None where none does."""
    longest = max(request.prompt + request.limit for request in workload.requests)
    tp = 1
    while tp <= min(cluster.gpus, MOST_TP):
        tokens = memory.kv_tokens(
            cluster.gpu, shape, arm, tp, cluster.reserved_bytes, cluster.fraction
        )
        if tokens > longest and shape.heads % tp == 0:
            return tp
        tp *= 2
    return None


def busiest(workload: Workload, engines: int) -> list[Request]:
    """The requests of the engine that has most to generate, where each is given one in turn."""
    shares = [list(workload.requests[first::engines]) for first in range(engines)]
    return max(shares, key=lambda share: sum(request.response for request in share))


def unmeasured(shape: Shape, workload: Workload, best: Prediction) -> list[str]:
    """What of a prediction lies outside of what was measured."""
    found = []
    longest = max(request.prompt + request.response for request in workload.requests)
    if longest > LONGEST:
        found.append(f"sequences of more than {LONGEST} tokens (the longest has {longest})")
    if best.outcome.peak_running > LARGEST:
        found.append(
            f"more than {LARGEST} running requests (at most {best.outcome.peak_running} run)"
        )
    others = [
        f"{n} x {k}"
        for n, k in gemms.shapes_of(shape, best.tp)
        if best.arm.fp8 and (n, k) not in gemms.table(best.arm.stack)
    ]
    if others:
        found.append(
            f"FP8 GEMMs of {', '.join(others)}, taken from a line through those of other shapes"
        )
    if best.arm.fp8 and (ragged := shape.ragged_sizes(best.tp)):
        found.append(
            f"layers of {', '.join(map(str, ragged))} channels on a GPU, which are no multiples of "
            f"128: ours pads them, stock SGLang has no block FP8 for them"
        )
    if best.tp > 1:
        found.append("communication between GPUs, which is left out: times are lower bounds")
    return found
