"""What of a prediction lies outside of what was measured."""

from sgl_fp8rl.tools.plan import gemms
from sgl_fp8rl.tools.plan.measured import ON_TWO_GPUS, figures
from sgl_fp8rl.tools.plan.prediction import Prediction
from sgl_fp8rl.tools.plan.shape import Shape
from sgl_fp8rl.tools.plan.workload import Workload

LONGEST, LARGEST = 30000, 1024
"""Tokens of a sequence, and running requests, up to which times were measured."""
EXPERTS = (128, 2048, 768, 8)
"""Experts, their sizes and how many a token takes, of the one model whose experts were measured."""


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
    if shape.experts:
        found.append(_experts(shape, best))
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
            f"layers with {', '.join(map(str, ragged))} channels on a GPU, not multiples of 128: "
            f"ours pads them, stock SGLang has no block FP8 for them"
        )
    if best.ep > 1:
        found.append(
            "expert parallelism: each GPU is taken to have as many tokens for its experts; steps "
            "wait for the one that has most"
        )
    if best.tp > 1:
        missed = figures()["errors"][ON_TWO_GPUS]
        found.append(
            f"communication between GPUs, which is left out: times are lower bounds, for decode "
            f"steps of Qwen3-32B on two H200s {missed['mean']:.0%} too short in the mean and "
            f"{missed['worst']:.0%} at worst"
        )
    return found


def _experts(shape: Shape, best: Prediction) -> str:
    inner = shape.intermediate_of(best.tp, best.arm.fp8)
    sizes = shape.experts, shape.hidden, inner, shape.experts_per_token
    others = "" if sizes == EXPERTS else " of {} x {} x {}, {} a token, nor any".format(*sizes)
    return (
        f"experts{others} in batches other than 64 sequences of 4096 tokens: the costs are those "
        f"of Qwen3-30B-A3B's experts at this load"
    )
