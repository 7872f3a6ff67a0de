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
STEPS_APART = 1
"""Representable values between ours and SGLang's, by the order of a sum or an exponential."""
LEAST_EQUAL = 0.99
"""Share of values that must be the same. On an H200 all are, of SiLU and of rotated q."""


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
    """Check that two tensors have the same bytes.

    Raises:
        RuntimeError: they have not.
    """
    _assert_alike(what, mine, other)
    differ = int((_bits(mine) != _bits(other)).sum())
    if differ:
        raise RuntimeError(f"{what}: {differ} of {mine.numel()} values are not SGLang's")


def assert_close(what: str, mine: torch.Tensor, other: torch.Tensor) -> None:
    """Check that nearly all values are the same and the others are neighbours.

    Raises:
        RuntimeError: they are not.
    """
    _assert_alike(what, mine, other)
    steps = (_in_order(mine) - _in_order(other)).abs()
    equal, apart = float((steps == 0).float().mean()), int(steps.max())
    if apart > STEPS_APART or equal < LEAST_EQUAL:
        raise RuntimeError(f"{what}: {equal:.4f} of values are SGLang's, others {apart} steps off")


def _assert_alike(what: str, mine: torch.Tensor, other: torch.Tensor) -> None:
    if (mine.shape, mine.dtype) != (other.shape, other.dtype):
        raise RuntimeError(
            f"{what}: ours is {mine.dtype} {list(mine.shape)}, SGLang's {other.dtype} "
            f"{list(other.shape)}"
        )


def _bits(x: torch.Tensor) -> torch.Tensor:
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    # a column alone has any stride and is contiguous all the same, which a view denies
    return x.clone(memory_format=torch.contiguous_format).view(kind)


def _in_order(x: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats: neighbours are 1 apart, both zeros are 0."""
    bits = _bits(x)
    least = torch.iinfo(bits.dtype).min
    return torch.where(bits < 0, least - bits.long(), bits.long())
