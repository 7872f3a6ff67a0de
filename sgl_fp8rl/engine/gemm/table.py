"""The table of the fastest GEMM kernels: for each (N, K), a kernel for each range of M.

If versions differ from those of the table that ships with the package, ``startup`` checks the
accuracy of its kernels again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_fp8rl.engine.gemm.candidates import CANDIDATES, STOCK, Config
from sgl_fp8rl.engine.gemm.tune_cache import Files, Machine

SHIPPED = Path(__file__).parent / "tables"

Shape = tuple[int, int]
"""N, K of a weight on this rank."""


@dataclass(frozen=True)
class Entry:
    """The kernel for batches up to ``m`` rows, starting after the previous entry."""

    m: int
    kernel: str
    config: Config
    us: float
    """Microseconds of the GEMM at M = ``m``."""
    stock_us: float
    """The same for the kernel that SGLang runs."""

    def __post_init__(self) -> None:
        if self.kernel not in CANDIDATES:
            raise ValueError(f"{self.kernel!r} is not a kernel of this version")


Table = dict[Shape, list[Entry]]
"""Entries by ascending ``m``; the stock choice runs above the last one."""


def _shape(sizes: Sequence[int]) -> Shape:
    n, k = sizes
    return n, k


def _bound(m: int, kernel: str, config: Config, us: float, stock_us: float) -> Entry:
    entry = Entry(m, kernel, config, us, stock_us)
    CANDIDATES[kernel].bind(config)  # raises for a config of another version
    return entry


FILES = Files("gemm", _shape, _bound)


def shipped(machine: Machine, with_flashinfer: bool, folder: Path = SHIPPED) -> tuple[Table, bool]:
    """The package's table for this GPU, and whether it was measured with these versions.

    Args:
        with_flashinfer: whether it may contain FlashInfer's kernel, which no start should build.
    """
    name = f"{machine.slug}{'-flashinfer' if with_flashinfer else ''}.json"
    return FILES.shipped(machine, folder / name)


def stock_entry(m: int, us: float) -> Entry:
    """The stock choice as an entry."""
    return Entry(m, STOCK, {}, us, us)
