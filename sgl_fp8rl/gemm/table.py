"""The table of the fastest product: for each (N, K), which kernel from which M to which.

Where versions differ from those of a table that came with the package, ``startup`` measures the
accuracy of its kernels again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_fp8rl.gemm.candidates import CANDIDATES, STOCK, Config
from sgl_fp8rl.gemm.tune_cache import Files, Machine

SHIPPED = Path(__file__).parent / "tables"

Shape = tuple[int, int]
"""N, K of a weight on this rank."""


@dataclass(frozen=True)
class Entry:
    """What runs for the batches up to ``m`` rows, from where the entry before ends."""

    m: int
    kernel: str
    config: Config
    us: float
    """Microseconds of the product at M = ``m``."""
    stock_us: float
    """The same of what SGLang runs."""

    def __post_init__(self) -> None:
        if self.kernel not in CANDIDATES:
            raise ValueError(f"{self.kernel!r} is no kernel of this version")


Table = dict[Shape, list[Entry]]
"""Entries by ascending ``m``; above the last one the stock choice runs."""


def _shape(sizes: Sequence[int]) -> Shape:
    n, k = sizes
    return n, k


def _bound(m: int, kernel: str, config: Config, us: float, stock_us: float) -> Entry:
    entry = Entry(m, kernel, config, us, stock_us)
    CANDIDATES[kernel].bind(config)  # a config of another version is told now
    return entry


FILES = Files("gemm", _shape, _bound)


def shipped(machine: Machine, with_flashinfer: bool, folder: Path = SHIPPED) -> tuple[Table, bool]:
    """The table that the package has for this card, and whether it is of these very versions.

    Args:
        with_flashinfer: whether FlashInfer's kernel may be in it: no start is to build that.
    """
    name = f"{machine.slug}{'-flashinfer' if with_flashinfer else ''}.json"
    return FILES.shipped(machine, folder / name)


def stock_entry(m: int, us: float) -> Entry:
    """The stock choice as an entry."""
    return Entry(m, STOCK, {}, us, us)
