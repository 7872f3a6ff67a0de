"""JSON files of measurements: for each shape, the fastest choice by batch size.

The user's own file is in the tune cache; its name has the GPU, its number of SMs and the versions
of the libraries that compile kernels. Files that ship with the package are by GPU alone, since the
fastest choice depends mostly on the GPU.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from sgl_fp8rl.files import write_whole

logger = logging.getLogger(__name__)

FORMAT = 1
"""Incremented when older files must not be read any more."""
PACKAGES = ("torch", "triton", "sglang", "sgl-deep-gemm", "flashinfer-python")
"""Their versions determine what a kernel does and how fast."""

S = TypeVar("S", bound=tuple[int, ...])
E = TypeVar("E", bound=Any)


@dataclass(frozen=True)
class Machine:
    """The GPU and versions that times were measured with."""

    gpu: str
    sms: int
    versions: Mapping[str, str]

    @classmethod
    def of(cls, gpu: str, sms: int) -> "Machine":
        """A GPU with the versions installed here."""
        return cls(gpu, sms, {name: _version(name) for name in PACKAGES})

    @classmethod
    def here(cls, device: int) -> "Machine":
        """The CUDA device ``device`` with the versions installed here."""
        properties = torch.cuda.get_device_properties(device)
        return cls.of(properties.name, properties.multi_processor_count)

    @property
    def slug(self) -> str:
        """The GPU's name as part of a file name."""
        return self.gpu.lower().replace(" ", "-").replace("/", "-")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@dataclass(frozen=True)
class Files(Generic[S, E]):
    """The files of one kind: a shape S, a tuple of sizes, has entries E by ascending ``m``."""

    kind: str
    """Prefix of the user's own file name."""
    shape: Callable[[Sequence[int]], S]
    """Makes a shape of these sizes; raises ValueError or TypeError for a wrong number."""
    entry: Callable[..., E]
    """Makes a dataclass with a field ``m``; raises ValueError, TypeError or KeyError."""

    def path(self, machine: Machine, folder: str) -> Path:
        """The user's own file in the tune cache ``folder``.

        Raises:
            OSError: ``~`` cannot be resolved here.
        """
        key = hashlib.sha256(json.dumps([FORMAT, asdict(machine)], sort_keys=True).encode())
        name = f"{self.kind}-{machine.slug}-{machine.sms}-{key.hexdigest()[:8]}.json"
        try:
            return Path(folder).expanduser() / name
        except RuntimeError as error:
            raise OSError(f"{folder} names no folder ({error}); set FP8RL_TUNE_CACHE") from None

    def save(self, path: Path, machine: Machine, table: Mapping[S, Sequence[E]]) -> None:
        """Write the table, an entry a line, atomically: a reader sees the old file or the new one.

        Raises:
            OSError: it cannot be written.
        """
        shapes = {
            "x".join(map(str, shape)): [asdict(entry) for entry in entries]
            for shape, entries in sorted(table.items())
        }
        text = json.dumps({"format": FORMAT, **asdict(machine), "shapes": shapes})
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.replace("[{", "[\n{").replace("}, {", "},\n{"))

    def read(self, path: Path) -> tuple[Machine, dict[S, list[E]]]:
        """A table and the machine that it was measured on.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not such a table, or has another format.
        """
        try:
            content = json.loads(path.read_text())
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']}, not {FORMAT}")
            machine = Machine(content["gpu"], content["sms"], content["versions"])
            table = {
                self.shape([int(size) for size in name.split("x")]): self._entries(rows)
                for name, rows in content["shapes"].items()
            }
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            raise ValueError(f"it is not a table of kernels ({error!r})") from None
        return machine, table

    def _entries(self, rows: Iterable[Mapping[str, Any]]) -> list[E]:
        entries = [self.entry(**row) for row in rows]
        if any(first.m >= second.m for first, second in pairwise(entries)):
            raise ValueError("its batch sizes do not ascend")
        return entries

    def own(self, machine: Machine, folder: str) -> dict[S, list[E]]:
        """The user's own table; empty, with a warning, if the file is unusable."""
        path = Path(folder)
        try:
            path = self.path(machine, folder)
            measured_on, table = self.read(path)
            if measured_on != machine:
                raise ValueError("it was measured on another GPU or with other versions")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            _not_used(path, error)
            return {}
        return table

    def shipped(self, machine: Machine, path: Path) -> tuple[dict[S, list[E]], bool]:
        """The package's table for this GPU, and whether it was measured with these versions."""
        if not path.exists():
            return {}, True
        try:
            measured_on, table = self.read(path)
        except (OSError, ValueError) as error:
            _not_used(path, error)
            return {}, True
        if (measured_on.gpu, measured_on.sms) != (machine.gpu, machine.sms):
            return {}, True
        return table, measured_on.versions == machine.versions


def _not_used(path: Path, error: Exception) -> None:
    logger.warning(
        "The table of kernels %s is not used; delete it, or run sgl-fp8rl tune again: %s",
        path,
        error,
    )
