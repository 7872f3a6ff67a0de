"""Files of what was measured: for each shape, what is fastest from one batch size to the next.

A file is JSON. The user's own, measured on his card, lies in the tune cache under a name made of
the card, its number of SMs and the versions of what compiles kernels. Files that come with the
package are for a card whatever the versions: what is fastest for a shape is mostly a matter of the
card.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

logger = logging.getLogger(__name__)

FORMAT = 1
"""Raised whenever an older file must not be read any more."""
PACKAGES = ("torch", "triton", "sglang", "sgl-deep-gemm", "flashinfer-python")
"""Their versions decide what a kernel does and how fast."""

S = TypeVar("S", bound=tuple[int, ...])
E = TypeVar("E", bound=Any)


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

    @classmethod
    def here(cls, device: int) -> "Machine":
        """The CUDA device ``device`` with what is installed here."""
        properties = torch.cuda.get_device_properties(device)
        return cls.of(properties.name, properties.multi_processor_count)

    @property
    def slug(self) -> str:
        """The card's name as part of a file's name."""
        return self.card.lower().replace(" ", "-").replace("/", "-")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@dataclass(frozen=True)
class Files(Generic[S, E]):
    """The files of one kind: a shape S, a tuple of sizes, has entries E by ascending ``m``."""

    kind: str
    """What the name of the user's own file begins with."""
    shape: Callable[[Sequence[int]], S]
    """The shape of these sizes; raises ValueError or TypeError where there are not as many."""
    entry: Callable[..., E]
    """A dataclass with a field ``m``; raises ValueError, TypeError or KeyError for wrong values."""

    def path(self, machine: Machine, folder: str) -> Path:
        """The user's own file in the tune cache ``folder``.

        Raises:
            OSError: ``~`` stands for no folder here.
        """
        key = hashlib.sha256(json.dumps([FORMAT, asdict(machine)], sort_keys=True).encode())
        name = f"{self.kind}-{machine.slug}-{machine.sms}-{key.hexdigest()[:8]}.json"
        try:
            return Path(folder).expanduser() / name
        except RuntimeError as error:
            raise OSError(f"{folder} names no folder ({error}); set FP8RL_TUNE_CACHE") from None

    def save(self, path: Path, machine: Machine, table: Mapping[S, Sequence[E]]) -> None:
        """Write the table at once: a reader sees the old file or the new one.

        Raises:
            OSError: it cannot be written.
        """
        shapes = {
            "x".join(map(str, shape)): [asdict(entry) for entry in entries]
            for shape, entries in sorted(table.items())
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

    def read(self, path: Path) -> tuple[Machine, dict[S, list[E]]]:
        """A table and the machine that it was measured on.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no such table, or one of another format.
        """
        try:
            content = json.loads(path.read_text())
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']}, not {FORMAT}")
            machine = Machine(content["card"], content["sms"], content["versions"])
            table = {
                self.shape([int(size) for size in name.split("x")]): self._entries(rows)
                for name, rows in content["shapes"].items()
            }
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            raise ValueError(f"it is no table of kernels ({error!r})") from None
        return machine, table

    def _entries(self, rows: Iterable[Mapping[str, Any]]) -> list[E]:
        entries = [self.entry(**row) for row in rows]
        if any(first.m >= second.m for first, second in pairwise(entries)):
            raise ValueError("its batch sizes do not ascend")
        return entries

    def own(self, machine: Machine, folder: str) -> dict[S, list[E]]:
        """The user's own table; empty, with a sentence in the log, where the file is not usable."""
        path = Path(folder)
        try:
            path = self.path(machine, folder)
            measured_on, table = self.read(path)
            if measured_on != machine:
                raise ValueError("it was measured on another card or with other versions")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            _not_used(path, error)
            return {}
        return table

    def shipped(self, machine: Machine, path: Path) -> tuple[dict[S, list[E]], bool]:
        """What the package's file has for this card, and whether it is of these very versions."""
        if not path.exists():
            return {}, True
        try:
            measured_on, table = self.read(path)
        except (OSError, ValueError) as error:
            _not_used(path, error)
            return {}, True
        if (measured_on.card, measured_on.sms) != (machine.card, machine.sms):
            return {}, True
        return table, measured_on.versions == machine.versions


def _not_used(path: Path, error: Exception) -> None:
    logger.warning("The table of kernels %s is not used: %s", path, error)
