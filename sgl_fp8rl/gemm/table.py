"""The table of the fastest product: for each (N, K), which kernel from which M to which.

A table is a JSON file. The user's own, measured on his card, lies in the tune cache under a name
made of the card, its number of SMs and the versions of what compiles kernels. Tables that come
with the package are for a card whatever the versions: what is fastest for a shape is mostly a
matter of the card, and ``prepare`` measures their accuracy again where versions differ.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

from sgl_fp8rl.gemm.candidates import CANDIDATES, STOCK, Config

logger = logging.getLogger(__name__)

FORMAT = 1
"""Raised whenever an older file must not be read any more."""
PACKAGES = ("torch", "triton", "sglang", "sgl-deep-gemm", "flashinfer-python")
"""Their versions decide what a kernel does and how fast."""
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


@dataclass(frozen=True)
class Machine:
    """What measured times belong to."""

    card: str
    sms: int
    versions: Mapping[str, str]

    @classmethod
    def of(cls, card: str, sms: int) -> "Machine":
        """The card with what is installed here."""
        return cls(card, sms, {name: _version(name) for name in PACKAGES})

    @property
    def slug(self) -> str:
        """The card's name as part of a file's name."""
        return self.card.lower().replace(" ", "-").replace("/", "-")

    def path(self, folder: str) -> Path:
        """The user's own table in the tune cache ``folder``.

        Raises:
            OSError: ``~`` stands for no folder here.
        """
        key = hashlib.sha256(json.dumps([FORMAT, asdict(self)], sort_keys=True).encode())
        name = f"gemm-{self.slug}-{self.sms}-{key.hexdigest()[:8]}.json"
        try:
            return Path(folder).expanduser() / name
        except RuntimeError as error:
            raise OSError(f"{folder} names no folder ({error}); set FP8RL_TUNE_CACHE") from None


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def save(path: Path, machine: Machine, table: Table) -> None:
    """Write the table at once: a reader sees the old file or the new one.

    Raises:
        OSError: it cannot be written.
    """
    shapes = {
        f"{n}x{k}": [{**asdict(entry), "config": dict(entry.config)} for entry in entries]
        for (n, k), entries in sorted(table.items())
    }
    content = {"format": FORMAT, **asdict(machine), "shapes": shapes}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1)
        Path(temporary).replace(path)
    except OSError:
        Path(temporary).unlink()
        raise


def read(path: Path) -> tuple[Machine, Table]:
    """A table and the machine that it was measured on.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no table, or one of another format.
    """
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']}, not {FORMAT}")
        machine = Machine(content["card"], content["sms"], content["versions"])
        table = {_shape(name): _entries(rows) for name, rows in content["shapes"].items()}
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is no table of kernels ({error!r})") from None
    return machine, table


def _shape(name: str) -> Shape:
    n, k = map(int, name.split("x"))
    return n, k


def _entries(rows: Iterable[Mapping[str, Any]]) -> list[Entry]:
    entries = [Entry(**row) for row in rows]
    if any(first.m >= second.m for first, second in pairwise(entries)):
        raise ValueError("its batch sizes do not ascend")
    for entry in entries:
        CANDIDATES[entry.kernel].bind(entry.config)  # a config of another version is told now
    return entries


def own(machine: Machine, folder: str) -> Table:
    """The user's own table; empty, with a sentence in the log, where the file is not usable."""
    path = Path(folder)
    try:
        path = machine.path(folder)
        measured_on, table = read(path)
        if measured_on != machine:
            raise ValueError("it was measured on another card or with other versions")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("The table of kernels %s is not used: %s", path, error)
        return {}
    return table


def shipped(machine: Machine, with_flashinfer: bool, folder: Path = SHIPPED) -> tuple[Table, bool]:
    """The table that the package has for this card, and whether it is of these very versions.

    Args:
        with_flashinfer: whether FlashInfer's kernel may be in it: no start is to build that.
    """
    path = folder / f"{machine.slug}{'-flashinfer' if with_flashinfer else ''}.json"
    if not path.exists():
        return {}, True
    try:
        measured_on, table = read(path)
    except (OSError, ValueError) as error:
        logger.warning("The table of kernels %s is not used: %s", path, error)
        return {}, True
    if (measured_on.card, measured_on.sms) != (machine.card, machine.sms):
        return {}, True
    return table, measured_on.versions == machine.versions


def stock_entry(m: int, us: float) -> Entry:
    """The stock choice as an entry."""
    return Entry(m, STOCK, {}, us, us)
