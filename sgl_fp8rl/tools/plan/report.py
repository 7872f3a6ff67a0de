"""What each way to serve would take for one rollout, and how the console prints it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sgl_fp8rl.tables import align
from sgl_fp8rl.tools.plan import schedule, speed
from sgl_fp8rl.tools.plan.schedule import Request
from sgl_fp8rl.tools.plan.shape import PlanError, Shape

HEADER = ("way", "GPUs", "KV tokens")
TIMED = ("running", "step ms", "rollout s", "tail s", "retracted", "tokens/s")


@dataclass(frozen=True)
class Cluster:
    """What serves.

    Args:
        gpu: ``speed.H200``, or another one, whose times are not known.
        gpus: all of them; each engine takes ``tp``.
        free_bytes: of each GPU, without what a trainer keeps while the engines run.
        fraction: ``mem_fraction_static``; None for what SGLang's estimate leaves.
        chunk: ``chunked_prefill_size``.
    """

    gpu: str
    free_bytes: float
    gpus: int = 1
    tp: int = 1
    fraction: float | None = None
    chunk: int = 8192

    @property
    def engines(self) -> int:
        return self.gpus // self.tp


@dataclass(frozen=True)
class Prediction:
    """Of one way to serve."""

    arm: speed.Arm
    fraction: float
    kv_tokens: int
    outcome: schedule.Outcome | None
    """None where nothing like it was measured with today's kernels."""


def predictions(shape: Shape, requests: Sequence[Request], cluster: Cluster) -> list[Prediction]:
    """Every way whose engines hold the model and the longest request, the fastest first.

    Raises:
        PlanError: there is none, or engines cannot have as many GPUs.
    """
    free, tp = cluster.free_bytes, cluster.tp
    if tp > cluster.gpus:
        raise PlanError(f"--tp {tp} needs more than --gpus {cluster.gpus}; give it --gpus {tp}")
    if not shape.is_divisible(tp):
        raise PlanError(
            f"--tp {tp} does not divide the model's {shape.heads} heads, {shape.kv_heads} KV heads "
            f"and MLP of {shape.intermediate}; give one that does"
        )
    share = busiest(requests, cluster.engines)
    longest = max(request.prompt + request.limit for request in requests)
    fraction = cluster.fraction or speed.mem_fraction_static(free, tp, cluster.chunk, len(share))
    tokens = {arm: speed.kv_tokens(free, shape, arm, tp, fraction) for arm in speed.ARMS}
    largest = max(tokens.values())
    if largest <= longest:
        what = (
            f"a request of up to {longest} tokens does not fit: the largest KV cache would hold "
            f"{largest}"
            if largest > 0
            else f"the model does not fit: its weights take "
            f"{shape.weight_bytes(fp8=True) / speed.GIB:.0f} GiB in FP8"
        )
        raise PlanError(
            f"{what}; give an engine more GPUs (--gpus, --tp) or memory (--mem-fraction-static, "
            f"--reserved-gib)"
        )
    found = []
    for arm, held in tokens.items():
        if held > longest:
            outcome = None
            if arm.figures and not untimed(shape, cluster):
                times = speed.Speed(arm, shape, arm.figures, speed.figures()["bytes_ms"])
                outcome = schedule.simulate(
                    schedule.Engine(held, times.decode_ms, times.prefill_ms, cluster.chunk), share
                )
            found.append(Prediction(arm, fraction, held, outcome))
    return sorted(found, key=lambda each: each.outcome.seconds if each.outcome else float("inf"))


def busiest(requests: Sequence[Request], engines: int) -> Sequence[Request]:
    """The requests of the engine that has most to generate, where each is given one in turn."""
    shares = [requests[first::engines] for first in range(engines)]
    return max(shares, key=lambda share: sum(request.response for request in share))


def untimed(shape: Shape, cluster: Cluster) -> list[str]:
    """Why no way to serve has times."""
    reasons = {
        "models with experts": bool(shape.experts),
        "engines of several GPUs": cluster.tp > 1,
        "other GPUs than an H200": cluster.gpu != speed.H200,
    }
    return [what for what, is_so in reasons.items() if is_so]


def unmeasured(
    shape: Shape, requests: Sequence[Request], cluster: Cluster, found: Sequence[Prediction]
) -> list[str]:
    """What was not measured with today's kernels, and what that means for the figures."""
    if reasons := untimed(shape, cluster):
        return [f"{' and '.join(reasons)}: plan predicts no times"]
    told = []
    if arms := [each.arm.name for each in found if not each.outcome]:
        told.append(f"{', '.join(arms)}: plan predicts no times")
    known = speed.figures()
    if asdict(shape) != known["shape"]:
        told.append(
            f"this model: times are those of {known['model']}, scaled by bytes and operations"
        )
    longest = max(request.prompt + request.response for request in requests)
    if longest > known["longest"]:
        told.append(f"sequences of more than {known['longest']} tokens (one has {longest})")
    running = max((each.outcome.peak_running for each in found if each.outcome), default=0)
    if running > known["largest"]:
        told.append(f"steps of more than {known['largest']} requests ({running} run)")
    return told


def render(
    shape: Shape, requests: Sequence[Request], cluster: Cluster, found: Sequence[Prediction]
) -> str:
    """The table, the flags of the best way, and what is not known."""
    generated = sum(request.response for request in requests)
    lines = [align([HEADER + TIMED, *(_row(each, cluster, generated) for each in found)]), ""]
    timed = [each for each in found if each.outcome]
    lines += [_flags((timed or found)[0], cluster), ""]
    known = speed.figures()
    if timed:
        lines += [f"Figures: {known['source']}.", _error()]
    lines += [
        f"Not measured with today's kernels: {what}."
        for what in unmeasured(shape, requests, cluster, found)
    ]
    return "\n".join(lines)


def as_json(found: Sequence[Prediction]) -> str:
    """All figures; an outcome that is not known is null."""
    return json.dumps([asdict(each) for each in found], indent=1)


def _row(each: Prediction, cluster: Cluster, generated: int) -> tuple[str, ...]:
    head = (each.arm.name, f"{cluster.engines} x {cluster.tp}", str(each.kv_tokens))
    outcome = each.outcome
    if outcome is None:
        return (*head, *("-" for _ in TIMED))
    return (
        *head,
        f"{outcome.mean_running:.0f}",
        f"{outcome.step_ms:.1f}",
        f"{outcome.seconds:.0f}",
        f"{outcome.tail_s:.0f}",
        str(outcome.retractions),
        f"{generated / outcome.seconds:.0f}",
    )


def _flags(best: Prediction, cluster: Cluster) -> str:
    """Of the fastest way; where plan predicts no times, what all ways have besides their own."""
    outcome = best.outcome
    way = best.arm.name if outcome else "each way, besides its own flags (docs/plan.md)"
    flags = [
        best.arm.flags if outcome else "",
        f"--tp-size {cluster.tp}" if cluster.tp > 1 else "",
        f"--mem-fraction-static {best.fraction}",
        f"--chunked-prefill-size {cluster.chunk}",
        f"--cuda-graph-max-bs-decode {max(outcome.peak_running, 1)}" if outcome else "",
    ]
    engines = f"{cluster.engines} engines, each" if cluster.engines > 1 else "one engine"
    idle = cluster.gpus - cluster.engines * cluster.tp
    rest = f" ({idle} of {cluster.gpus} GPUs idle)" if idle else ""
    return f"{way}: {engines} with{rest}\n  {' '.join(flag for flag in flags if flag)}"


def _error() -> str:
    """How far steps and prefills are off that the fit did not see."""
    errors = speed.figures()["errors"]["left out"]
    told = (
        f"{what} {off['mean']:.1%} in the mean and {off['worst']:.1%} at worst"
        for what, metric in (("decode steps", "decode_step_ms"), ("prefills", "prefill_s"))
        for off in [errors[metric]]
    )
    return f"Off by, where a load was left out of the fit: {', '.join(told)}."
