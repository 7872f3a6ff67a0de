"""What SGLang runs and what we run in its place: checked to compute the same, then timed.

Each arm of a pair is a list of calls, most often one a layer with tensors of its own, as in a step.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from benchmarks import measuring
from benchmarks.benchmark import Measurement
from benchmarks.engines import models
from benchmarks.measuring import Call

MODEL = "qwen3-8b"
SHAPE = models.MODELS[MODEL]
TOKENS = (1, 16, 64, 128, 256, 2048, 16384)
DECODE = TOKENS[:5]
"""Batches of a decode step, for what runs in no other."""
LAYERS = SHAPE.layers
BUDGET_BYTES = 12 << 30
"""Of the tensors of one pair: where so many as layers would not fit, calls go round fewer."""
NEIGHBOURS = {torch.bfloat16: (2.0**-7, 0.0), torch.float8_e4m3fn: (2.0**-3, 2.0**-9)}
"""Relative and absolute difference of values that are next to each other: ours and SGLang's, by the
order of a sum or an exponential."""


@dataclass(frozen=True)
class Pair:
    """One kernel at one size."""

    kernel: str
    size: str
    nbytes: int
    """What must be read and written once, whatever does it."""
    check: Call
    """Raises RuntimeError where the arms do not compute the same."""
    stock: Sequence[Call]
    ours: Sequence[Call]
    clock: Callable[[Sequence[Call]], list[float]] = measuring.graph_us

    @property
    def case(self) -> str:
        """The case in the result file; kernels' names have no colon."""
        return f"{self.kernel}: {self.size}"


def measurements(pairs: Iterable[Pair], copy_tb_s: float) -> list[Measurement]:
    """Two measurements a pair; the floor is with ours.

    Raises:
        RuntimeError: a pair does not agree.
    """
    made: list[Measurement] = []
    for pair in pairs:
        pair.check()
        ours = {
            "kernel_us": pair.clock(pair.ours),
            "kernel_floor_us": [pair.nbytes / copy_tb_s / 1e6],
        }
        stock = {"kernel_us": pair.clock(pair.stock)}
        made += [
            {"arm": arm, "case": pair.case, "model": MODEL, "values": values}
            for arm, values in (("stock", stock), ("ours", ours))
        ]
    made[0]["values"]["copy_tb_s"] = [copy_tb_s]
    return made


def sets_of(nbytes: int) -> int:
    """How many sets of tensors of ``nbytes`` the calls go round."""
    return max(2, min(LAYERS, BUDGET_BYTES // nbytes))


def assert_same(what: str, mine: torch.Tensor, other: torch.Tensor) -> None:
    """Check that two tensors have the same values.

    Raises:
        RuntimeError: they have not.
    """
    _assert_within(what, mine, other, 0.0, 0.0)


def assert_close(what: str, mine: torch.Tensor, other: torch.Tensor) -> None:
    """Check that values are the same or neighbours.

    Raises:
        RuntimeError: they are not.
    """
    _assert_within(what, mine, other, *NEIGHBOURS[mine.dtype])


def _assert_within(
    what: str, mine: torch.Tensor, other: torch.Tensor, rtol: float, atol: float
) -> None:
    if (mine.shape, mine.dtype) != (other.shape, other.dtype):
        raise RuntimeError(
            f"{what}: ours is {mine.dtype} {list(mine.shape)}, SGLang's {other.dtype} "
            f"{list(other.shape)}"
        )
    far = ~torch.isclose(mine.float(), other.float(), rtol, atol)
    if bool(far.any()):
        raise RuntimeError(f"{what}: {int(far.sum())} of {far.numel()} values are not SGLang's")
