"""Time of an update: on one GPU a fixed part and one by the bytes moved, and by links elsewhere."""

from sgl_fp8rl.tools.plan.measured import figures
from sgl_fp8rl.tools.plan.shape import BF16_BYTES, Shape
from sgl_fp8rl.tools.plan.speed import H200_BYTES_MS

NVLINK_BYTES_MS = 3.9e8
"""Bytes that an H200 reads from another one of its host in a millisecond: copies took 389 to 393
GB/s between any two of four, all at once too."""
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


def sharded_kernels_ms(shape: Shape, gpus: int) -> float:
    """The engine's kernels, where FSDP2 and the engine share the GPUs of one host.

    Each rank reads and writes its share in its own memory, and reads from the other GPUs what
    tensor parallelism cuts by columns.
    """
    crossing = shape.crossing_weights * BF16_BYTES * (gpus - 1) / gpus
    own = moved_bytes(shape, "mapped") - crossing
    return own / gpus / H200_BYTES_MS + crossing / gpus / NVLINK_BYTES_MS


def codes_over_nvlink_ms(shape: Shape, ranks: int, own: float) -> float:
    """What a rank of an engine reads of other GPUs of the host, where the trainer's ranks made
    codes.

    Args:
        ranks: of the engine, which share the weights.
        own: how much of what it reads lies on its own GPU, from 0 to 1.
    """
    return shape.weight_bytes(fp8=True) / ranks * (1 - own) / NVLINK_BYTES_MS


def kernels_ms(shape: Shape, engines: int, tp: int) -> float:
    """The engines' kernels, where FSDP2 has all of their GPUs: at least, since links are shared."""
    gpus = engines * tp
    if engines == 1:
        return sharded_kernels_ms(shape, gpus)
    return codes_over_nvlink_ms(shape, tp, 1 / gpus)


def remote_s(shape: Shape, engines: int, gigabits: float, senders: int) -> float:
    """The outgoing links of trainer hosts: each sends its part of FP8 to the engines, which are on
    other hosts, and of BF16 to the other trainer hosts, which gather all."""
    codes = shape.weight_bytes(fp8=True) * engines / senders
    gathered = shape.weight_bytes(fp8=False) * (senders - 1) / senders
    return (codes + gathered) * 8 / gigabits / 1e9
