"""Time of an update from a trainer on the same GPU: a fixed part, and one by the bytes moved."""

from sgl_fp8rl.plan.measured import figures
from sgl_fp8rl.plan.shape import Shape
from sgl_fp8rl.plan.speed import H200_BYTES_MS

WAYS = ("mapped", "bucket")
"""``mapped``: the weights stay where they are, and are read in place; ``bucket``: they move."""


def moved_bytes(shape: Shape, way: str) -> float:
    """Bytes that are read and written where each is touched once: BF16 in, FP8 out."""
    fp8 = shape.weight_bytes(fp8=True)
    through = 2 * fp8 if way == "bucket" else 0.0  # the trainer quantizes into the bucket
    return shape.weight_bytes(fp8=False) + through + fp8


def update_ms(shape: Shape, way: str) -> float:
    """One update of an engine on one H200."""
    measured = figures()["update"][way]
    floor_ms = moved_bytes(shape, way) / H200_BYTES_MS
    return float(measured["fixed_ms"] + measured["share"] * floor_ms)
