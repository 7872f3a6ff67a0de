"""A prediction as the console prints it, and beside a run."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sgl_fp8rl.tables import align
from sgl_fp8rl.tools.plan import gains, update_time
from sgl_fp8rl.tools.plan.measured import ROLLOUTS, figures
from sgl_fp8rl.tools.plan.prediction import Cluster, Prediction, best_of_arms
from sgl_fp8rl.tools.plan.shape import Shape
from sgl_fp8rl.tools.plan.unmeasured import unmeasured
from sgl_fp8rl.tools.plan.workload import Workload, WorkloadError

ONE_HOST = 8
"""GPUs."""
HEADER = (
    "way",
    "GPUs",
    "KV tokens",
    "running",
    "step ms",
    "rollout s",
    "tail s",
    "retracted",
    "tokens/s",
)
CHECKED: dict[str, Callable[[Prediction], float]] = {
    "rollout_s": lambda each: each.outcome.seconds,
    "rollout_tokens_s": lambda each: each.tokens_s,
    "running_requests": lambda each: each.outcome.mean_running,
    "retractions": lambda each: float(each.outcome.retractions),
    "kv_tokens": lambda each: float(each.kv_tokens),
}
"""Figures of a run that are compared with the prediction, by the names of the benchmarks."""


def render(
    shape: Shape,
    workload: Workload,
    cluster: Cluster,
    found: Sequence[Prediction],
    train_s: float | None,
) -> str:
    """The table, the flags of the best way, and what is not known.

    Args:
        found: all ways to serve.
    """
    best, *others = best_of_arms(found)
    rows = [HEADER, *(_row(each) for each in (best, *others))]
    lines = [align(rows), "", _flags(best, cluster), ""]
    lines += gains.lines(shape, workload, cluster, found, best.tp)
    lines += [_step(shape, best, cluster, train_s), ""]
    lines += [f"Figures: {cluster.gpu.source}.", _error()]
    lines += [f"Not measured: {what}." for what in unmeasured(shape, workload, best)]
    return "\n".join(lines)


def as_json(found: Sequence[Prediction]) -> str:
    """All figures of the best size of each arm."""
    return json.dumps([asdict(each) for each in best_of_arms(found)], indent=1)


def check(path: Path, found: Sequence[Prediction]) -> str:
    """A run's figures beside the predicted ones.

    Args:
        path: ``{"rows": [{"arm": ..., "metric": ..., "median": ...}]}``, as a benchmark writes it.

    Raises:
        WorkloadError: it has none that could be compared.
    """
    by_arm = {each.arm.name: each for each in best_of_arms(found)}
    rows: list[tuple[str, ...]] = [("way", "figure", "predicted", "measured", "off by")]
    for row in _measured_rows(path):
        each, metric = by_arm.get(str(row.get("arm"))), str(row.get("metric"))
        if each is None or metric not in CHECKED:
            continue
        predicted, seen = CHECKED[metric](each), float(row["median"])
        off = f"{predicted / seen - 1:+.1%}" if seen else "-"
        rows.append((each.arm.name, metric, f"{predicted:.1f}", f"{seen:.1f}", off))
    if len(rows) == 1:
        raise WorkloadError(f"{path} has no figure to compare: {', '.join(CHECKED)} of an arm")
    return align(rows, left=(0, 1))


def _measured_rows(path: Path) -> list[dict[str, Any]]:
    try:
        rows = json.loads(path.read_text())["rows"]
        numbers = [row for row in rows if isinstance(row["median"], (int, float))]
        return [row for row in numbers if math.isfinite(row["median"])]
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise WorkloadError(
            f"{path} is not a result file ({type(error).__name__}); see docs/plan.md"
        ) from None


def _row(each: Prediction) -> tuple[str, ...]:
    outcome = each.outcome
    return (
        each.arm.name,
        f"{each.engines} x {each.tp}",
        str(each.kv_tokens),
        f"{outcome.mean_running:.0f}",
        f"{outcome.step_ms:.1f}",
        f"{outcome.seconds:.0f}",
        f"{outcome.tail_s:.0f}",
        str(outcome.retractions),
        f"{each.tokens_s:.0f}",
    )


def _flags(best: Prediction, cluster: Cluster) -> str:
    running = max(best.outcome.peak_running, 1)
    flags = [
        best.arm.flags,
        f"--tp-size {best.tp}" if best.tp > 1 else "",
        f"--ep-size {best.ep}" if best.ep > 1 else "",
        f"--mem-fraction-static {best.fraction}",
        f"--chunked-prefill-size {cluster.chunk}",
        f"--cuda-graph-max-bs-decode {running}",
    ]
    engines = f"{best.engines} engines, each" if best.engines > 1 else "one engine"
    idle = cluster.gpus - best.engines * best.tp
    rest = f" ({idle} of {cluster.gpus} GPUs idle)" if idle else ""
    return f"{best.arm.name}: {engines} with{rest}\n  {' '.join(flag for flag in flags if flag)}"


def _step(shape: Shape, best: Prediction, cluster: Cluster, train_s: float | None) -> str:
    """The update, where one like it was measured, and a step of the training with it."""
    is_known = best.arm.stack == "ours" and cluster.gpu.scale == 1.0 and cluster.gpus <= ONE_HOST
    update, most_ms = (
        _update(shape, best) if is_known else ("How long an update takes is not known here", 0.0)
    )
    if train_s is None:
        return f"{update}."
    step = best.outcome.seconds + train_s + most_ms / 1e3
    share = best.outcome.seconds / step
    what = "An RL step" if is_known else "An RL step without it"
    return f"{update}. {what}: {step:.0f} s, of which the rollout {share:.0%}."


def _update(shape: Shape, best: Prediction) -> tuple[str, float]:
    """What it takes, and the most of it in ms."""
    gpus = best.engines * best.tp
    if gpus == 1:
        ms = {way: update_time.update_ms(shape, way) for way in update_time.WAYS}
        ways = " or ".join(f"{each:.0f} ms {way}" for way, each in ms.items())
        said = f"An update on the same GPU: {ways}, by a line through Qwen3-8B and Qwen3-30B-A3B"
        return said, max(ms.values())
    kernels = update_time.kernels_ms(shape, best.engines, best.tp)
    least, most = (figures()["update"]["host"][each] for each in ("least_ms", "most_ms"))
    return (
        f"An update from FSDP2 on the same {gpus} GPUs: at least {kernels + least:.0f} ms, "
        f"{kernels:.0f} for what memory and links carry and {least:.0f} to {most:.0f} of the host, "
        f"as measured with 2 and 4 GPUs",
        kernels + most,
    )


def _error() -> str:
    decode, rollouts = (figures()["errors"][what] for what in ("decode, a load left out", ROLLOUTS))
    return (
        f"Error on one H200: decode steps of Qwen3-8B and Qwen3-30B-A3B that were left out of the "
        f"fit are {decode['mean']:.0%} off in the mean and {decode['worst']:.0%} at worst; "
        f"{rollouts['rows']} {ROLLOUTS} {rollouts['worst']:.0%} at worst."
    )
