"""What FP8 weights and an FP8 KV cache give: in this rollout, and in decode steps of any batch."""

from collections.abc import Sequence
from itertools import groupby

from sgl_fp8rl.tools.plan import speed
from sgl_fp8rl.tools.plan.prediction import Cluster, Prediction
from sgl_fp8rl.tools.plan.shape import Shape
from sgl_fp8rl.tools.plan.unmeasured import LARGEST
from sgl_fp8rl.tools.plan.workload import Workload

COMPARED = (
    ("FP8 weights and our kernels", "stock-bf16", "fp8rl"),
    ("An FP8 KV cache", "fp8rl", "fp8rl-kv8"),
    ("Ours", "stock-block-fp8-kv8-xqa", "fp8rl-kv8"),
)
"""What is told of, an arm without it and one with it."""
IN_E4M3, IN_INT8 = (arm for arm in speed.ARMS if arm.name in ("fp8rl-kv8", "fp8rl-kv8-int8"))
LEAST = 1.05
"""Times as fast: with less, it does not pay."""
BATCHES = tuple(1 << power for power in range(LARGEST.bit_length()))


def lines(
    shape: Shape, workload: Workload, cluster: Cluster, found: Sequence[Prediction], tp: int
) -> list[str]:
    """A line for each, between engines of the same size.

    Args:
        found: all ways to serve.
    """
    seconds = {each.arm.name: each.outcome.seconds for each in found if each.tp == tp}
    engines = f" at TP {tp}" if tp > 1 else ""
    told = [
        f"{what}: {seconds[without] / seconds[having]:.2f} times as fast as {without}{engines}; "
        f"decode steps at least {LEAST} times as fast with "
        f"{_batches(shape, workload.mean_context, cluster, tp, without, having)}."
        for what, without, having in COMPARED
        if without in seconds and having in seconds
    ]
    if IN_E4M3.name in seconds and IN_INT8.name in seconds:
        ratio = seconds[IN_E4M3.name] / seconds[IN_INT8.name]
        told.append(
            f"An INT8 KV cache ({IN_INT8.flags}), which is nearer to BF16's values: {ratio:.2f} "
            f"times as fast as {IN_E4M3.name} by its bytes and BF16's prefill; docs/kv_cache.md "
            f"has what engines took."
        )
    return told


def _batches(
    shape: Shape, context: int, cluster: Cluster, tp: int, without: str, having: str
) -> str:
    """Of which sizes a batch gains enough."""
    times = speed.speed_of(cluster.gpu.scale)
    arms = {arm.name: arm for arm in speed.ARMS}

    def step_ms(name: str, batch: int) -> float:
        return times.decode_ms(arms[name], shape, batch, float(batch * context), tp)

    pays = [step_ms(without, each) >= LEAST * step_ms(having, each) for each in BATCHES]
    return f"{ranges(pays) or f'no number up to {BATCHES[-1]} of'} sequences of {context} tokens"


def ranges(pays: Sequence[bool]) -> str:
    """The batches that do, next to each other from the first to the last."""
    groups = groupby(zip(BATCHES, pays, strict=True), key=lambda each: each[1])
    found = [[batch for batch, _ in group] for does, group in groups if does]
    return " and ".join(
        f"{some[0]} to {some[-1]}" if len(some) > 1 else f"{some[0]}" for some in found
    )
