"""The files of a chain: safetensors compressed by zstd, and an index that names those that count.

A file is written before the index names it, and the index is replaced at once. So a reader of the
folder, or of a copy of it in which files arrive in any order, sees whole versions or that a file is
missing.
"""

import fcntl
import hashlib
import json
import os
import re
import zlib
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import torch

from sgl_fp8rl.protocol.attempt import attempt
from sgl_fp8rl.protocol.policy import Policy, check_policy
from sgl_fp8rl.protocol.values import excerpt

INDEX, LOCK = "chain.json", ".lock"
FORMAT = 1
PART_BYTES = 1 << 30
"""A version is written in files of about so many bytes, since one is made in memory."""
LEVEL, THREADS = 1, 4
"""Of zstd. Codes hold little that a higher level finds: its entropy coder does the work."""
_NAME = re.compile(r"[A-Za-z0-9-]+\.safetensors\.zst")

Tensors = dict[str, torch.Tensor]
"""All tensors of a version, on the CPU, by their names in an HF checkpoint."""


class ChainError(RuntimeError):
    """A chain cannot be written or read; the last good version stays what it is."""


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
    """The serial of the version that ``delta`` changes; 0 where there is no delta."""
    delta: tuple[Part, ...]
    anchor: tuple[Part, ...]
    """All tensors; none at most versions."""
    is_exact: bool = True
    """Whether it is the trainer's version, and not what a budget left of it."""

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


class PartWriter:
    """Writes tensors into files of about ``PART_BYTES``.

    Args:
        name: what the files' names begin with.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._tensors: Tensors = {}
        self._bytes = 0
        self.parts: list[Part] = []

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor, which must not change before ``finish``."""
        self._tensors[name] = tensor
        self._bytes += tensor.nbytes
        if self._bytes >= PART_BYTES:
            self._write()

    def finish(self) -> tuple[Part, ...]:
        """The files, all of which are on disk: at least one, which may hold no tensor."""
        if self._tensors or not self.parts:
            self._write()
        return tuple(self.parts)

    def _write(self) -> None:
        from safetensors.torch import save

        raw = save(self._tensors)
        content = zstandard().ZstdCompressor(level=LEVEL, threads=THREADS).compress(raw)
        name = f"{self._name}-{len(self.parts)}.safetensors.zst"
        replace(self._folder / name, content)
        digest = hashlib.sha256(content).hexdigest()
        self.parts.append(Part(name, len(content), len(raw), digest))
        self._tensors, self._bytes = {}, 0


def read(folder: Path, parts: tuple[Part, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of some files, each of which is checked before they are given.

    Raises:
        ChainError: a file is missing, before any is read, or is not what was written.
    """
    for part in parts:
        try:
            size = (folder / part.name).stat().st_size
        except OSError as error:
            raise ChainError(f"{part.name} of the chain is not there ({error}); copy it") from error
        if size != part.bytes:
            raise ChainError(f"{part.name} of the chain has {size} of {part.bytes} bytes; copy it")
    for part in parts:
        tensors, fault = attempt(_tensors, folder, part)
        if tensors is None:
            raise ChainError(f"{part.name} of the chain cannot be read: {brief(fault)}") from fault
        yield from tensors.items()


def _tensors(folder: Path, part: Part) -> Tensors:
    from safetensors.torch import load

    content = (folder / part.name).read_bytes()
    if hashlib.sha256(content).hexdigest() != part.sha256:
        raise ChainError("its bytes are not those that were written; copy it again")
    if zstandard().frame_content_size(content) != part.raw_bytes:
        raise ChainError(f"it does not hold the {part.raw_bytes} bytes that the index says")
    found: Tensors = load(zstandard().ZstdDecompressor().decompress(content))
    return found


def digest(tensors: Tensors) -> str:
    """SHA-256 over name, type, shape and CRC-32 of each tensor: files have SHA-256 of their own."""
    described = [
        (name, str(t.dtype), tuple(t.shape), zlib.crc32(as_bytes(t).numpy().data))
        for name, t in sorted(tensors.items())
    ]
    return hashlib.sha256(repr(described).encode()).hexdigest()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, uint8 ``[N]``."""
    return tensor.view(-1).view(torch.uint8)


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
            raise ValueError(f"{excerpt(part.name)} is no name of a file of a chain")
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


def brief(error: Exception | None) -> str:
    """The type and the beginning of an error that may have anything in its text."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"


def write_index(folder: Path, index: Index) -> None:
    """Replace the index."""
    replace(folder / INDEX, json.dumps({"format": FORMAT, **asdict(index)}, indent=1).encode())


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
    """Keep other publishers out of a folder, until the file that is returned is closed.

    Raises:
        ChainError: one is at work.
    """
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


def zstandard() -> Any:
    """The library.

    Raises:
        ChainError: it is not installed.
    """
    try:
        import zstandard as library
    except ImportError as error:
        raise ChainError("a chain needs zstandard; run pip install zstandard") from error
    return library
