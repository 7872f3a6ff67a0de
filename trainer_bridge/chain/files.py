"""The files of a chain: safetensors compressed by zstd, and an index that names those that count.

A file is written before the index names it, and the index is replaced at once. So a reader of the
folder, or of a copy of it in which files arrive in any order, sees whole versions or that a file is
missing.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sgl_fp8rl.protocol.policy import Policy, check_policy

INDEX = "chain.json"
FORMAT = 1
PART_BYTES = 1 << 30
"""A version is written in files of about so many bytes, since one is made in memory."""
LEVEL = 1
"""Of zstd: codes have little to be found but by its entropy coder, and it is the fastest."""


class ChainError(RuntimeError):
    """A chain cannot be written or read; the last good version stays what it is."""


@dataclass(frozen=True)
class Part:
    """A file."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Link:
    """A version."""

    run: str
    version: int
    digest: str
    """Of all tensors (``weights_digest``)."""
    base: str
    """The digest of the version before, which ``delta`` is of; empty where there is no delta."""
    delta: tuple[Part, ...]
    anchor: tuple[Part, ...]
    """All tensors; empty at most versions."""

    @property
    def policy(self) -> Policy:
        return Policy(self.run, self.version)


class PartWriter:
    """Writes tensors into files of about ``PART_BYTES``.

    Args:
        name: what the files' names begin with.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, f"{name}-{secrets.token_hex(4)}"
        self._tensors: dict[str, torch.Tensor] = {}
        self._bytes = 0
        self.parts: list[Part] = []

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor, which must not change before ``finish``."""
        self._tensors[name] = tensor
        self._bytes += tensor.nbytes
        if self._bytes >= PART_BYTES:
            self._write()

    def finish(self) -> tuple[Part, ...]:
        """The files, all of which are on disk."""
        if self._tensors or not self.parts:
            self._write()
        return tuple(self.parts)

    def _write(self) -> None:
        from safetensors.torch import save

        content = _zstandard().ZstdCompressor(level=LEVEL, threads=-1).compress(save(self._tensors))
        name = f"{self._name}-{len(self.parts)}.safetensors.zst"
        self.parts.append(Part(name, len(content), hashlib.sha256(content).hexdigest()))
        replace(self._folder / name, content)
        self._tensors, self._bytes = {}, 0


def read(folder: Path, parts: tuple[Part, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of some files, of which each has been checked before the first is given.

    Raises:
        ChainError: a file is missing, or is not what was written.
    """
    for part in parts:
        _content(folder, part)
    return (pair for part in parts for pair in _tensors(_content(folder, part)).items())


def _content(folder: Path, part: Part) -> bytes:
    path = folder / part.name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ChainError(f"{part.name} of the chain cannot be read ({error}); copy it") from error
    if hashlib.sha256(content).hexdigest() != part.sha256:
        raise ChainError(
            f"{part.name} of the chain has {len(content)} bytes that are not the {part.bytes} that "
            f"were written; copy it again"
        )
    return content


def _tensors(content: bytes) -> dict[str, torch.Tensor]:
    from safetensors.torch import load

    found: dict[str, torch.Tensor] = load(_zstandard().ZstdDecompressor().decompress(content))
    return found


def read_index(folder: Path) -> list[Link]:
    """The versions, oldest first; none where nothing was published yet.

    Raises:
        ChainError: the index is none of this version of the package.
    """
    try:
        text = (folder / INDEX).read_text()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ChainError(f"{INDEX} of the chain cannot be read ({error})") from error
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, not {FORMAT}")
        return [_link(each) for each in content["links"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ChainError(
            f"{INDEX} is no index of a chain ({type(error).__name__}: {error}); use one sgl-fp8rl "
            f"on both sides"
        ) from error


def _link(found: dict[str, Any]) -> Link:
    delta, anchor = (tuple(Part(**part) for part in found[kind]) for kind in ("delta", "anchor"))
    for part in (*delta, *anchor):
        if Path(part.name).name != part.name:
            raise ValueError(f"{part.name!r} is no name of a file in it")
    link = Link(**{**found, "delta": delta, "anchor": anchor})
    check_policy(link.run, link.version)
    return link


def write_index(folder: Path, links: list[Link]) -> None:
    """Replace the index."""
    content = {"format": FORMAT, "links": [asdict(link) for link in links]}
    replace(folder / INDEX, json.dumps(content, indent=1).encode())


def delete_all_but(folder: Path, links: list[Link]) -> None:
    """Delete the files that no version has: of a publication that failed, or of old ones."""
    named = {part.name for link in links for part in (*link.delta, *link.anchor)}
    for path in folder.glob("*.safetensors.zst"):
        if path.name not in named:
            path.unlink(missing_ok=True)


def replace(path: Path, content: bytes) -> None:
    """Write a file such that no crash leaves a part of it under its name."""
    unfinished = path.with_name(f"{path.name}.tmp")
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ChainError("a chain needs zstandard; run pip install zstandard") from error
    return zstandard
