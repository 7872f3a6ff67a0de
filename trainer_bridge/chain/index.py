"""The index of a chain: its versions, and the files of each; one publisher at work.

Files are written before the index names them, and the index is replaced at once. So a reader of the
folder, or of a copy of it in which files arrive in any order, sees whole versions or that a file is
missing.
"""

import fcntl
import json
import os
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

from sgl_fp8rl.protocol.manifest import check_policy
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.values import attempt, excerpt
from trainer_bridge.ranks.rank_values import exchanged

LOCK = ".lock"
INDEX = "chain.json"
FORMAT = 2
_NAME = re.compile(r"[A-Za-z0-9-]+\.safetensors\.zst")


@exchanged
class ChainError(RuntimeError):
    """A chain cannot be written or read; the last good version stays what it is."""


def brief(error: Exception | None) -> str:
    """The type and the beginning of an error that may have anything in its text."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"


def delete_all_but(folder: Path, names: Collection[str]) -> None:
    """Delete the files of versions, but for these: what is old, or of a process that was killed."""
    for path in folder.glob("*.safetensors.zst*"):
        if path.name not in names:
            path.unlink(missing_ok=True)


def replace(path: Path, content: bytes) -> None:
    """Write a file such that no crash leaves a part of it under its name."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def lock(folder: Path) -> BinaryIO:
    """Keep other publishers out of a folder, until the file that is returned is closed."""
    file = (folder / LOCK).open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ChainError(
            f"another process publishes in {folder}; end it, or use another"
        ) from error
    except OSError:  # a file system without locks
        pass
    return file


@dataclass(frozen=True)
class Part:
    """A file."""

    name: str
    bytes: int
    raw_bytes: int
    """Before compression."""
    sha256: str


@dataclass(frozen=True)
class Link:
    """A version."""

    serial: int
    """Grows from version to version, also from run to run; no other version has it."""
    run: str
    version: int
    digest: str
    """Of all tensors."""
    base: int
    """The serial of the version that ``delta`` changes, or 0 without a delta."""
    delta: tuple[Part, ...]
    anchor: tuple[Part, ...]
    """All tensors; none at most versions."""

    @property
    def policy(self) -> Policy:
        return Policy(self.run, self.version)


@dataclass(frozen=True)
class Index:
    """The versions that can be read."""

    links: tuple[Link, ...] = ()
    """Oldest first."""
    replaced: tuple[str, ...] = ()
    """Runs that ended when another one began: engines refuse them."""

    @property
    def serial(self) -> int:
        """Of the newest version, 0 where there is none."""
        return self.links[-1].serial if self.links else 0

    @property
    def parts(self) -> set[str]:
        """The names of all files."""
        return {part.name for link in self.links for part in (*link.delta, *link.anchor)}


def read_index(folder: Path) -> Index:
    """The index; an empty one where nothing was published yet.

    Raises:
        ChainError: it is none of this version of the package.
    """
    try:
        text = (folder / INDEX).read_text()
    except FileNotFoundError:
        return Index()
    except (OSError, ValueError) as error:
        raise ChainError(f"{folder / INDEX} cannot be read: {error}") from error
    found, fault = attempt(_index, text)
    if found is None:
        raise ChainError(
            f"{folder / INDEX} is not the index of a chain ({brief(fault)}); copy it again, and "
            f"use the same version of sgl-fp8rl on both sides"
        ) from fault
    return found


def _index(text: str) -> Index:
    content = json.loads(text)
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']}, not {FORMAT}")
    return Index(tuple(map(_link, content["links"])), tuple(map(str, content["replaced"])))


def _link(found: dict[str, Any]) -> Link:
    delta, anchor = (tuple(Part(**part) for part in found[kind]) for kind in ("delta", "anchor"))
    for part in (*delta, *anchor):
        if not _NAME.fullmatch(part.name):
            raise ValueError(f"{excerpt(part.name)} is not the name of a chain's file")
        _check_types(part)
    link = Link(**{**found, "delta": delta, "anchor": anchor})
    _check_types(link)
    check_policy(link.run, link.version)
    return link


def _check_types(found: Part | Link) -> None:
    for field in fields(found):
        value = getattr(found, field.name)
        if field.type in (int, str, bool) and type(value) is not field.type:
            raise TypeError(f"{field.name} is {excerpt(value)}")


def write_index(folder: Path, index: Index) -> None:
    """Replace the index."""
    replace(folder / INDEX, json.dumps({"format": FORMAT, **asdict(index)}, indent=1).encode())
