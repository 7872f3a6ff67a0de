"""The files of a chain: safetensors compressed by zstd."""

import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sgl_fp8rl.protocol.attempt import attempt
from trainer_bridge.chain.index import ChainError, Part, brief, replace

PART_BYTES = 1 << 30
"""A version is written in files of about so many bytes, since one is made in memory."""
LEVEL, THREADS = 1, 4
"""Of zstd. Codes hold little that a higher level finds: its entropy coder does the work."""

Tensors = dict[str, torch.Tensor]
"""All tensors of a version, on the CPU, by their names in an HF checkpoint."""


class PartWriter:
    """Writes tensors into files of about ``PART_BYTES``."""

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


def zstandard() -> Any:
    """The library."""
    try:
        import zstandard as library
    except ImportError as error:
        raise ChainError("a chain needs zstandard; run pip install zstandard") from error
    return library
