"""The files of a chain: safetensors compressed by zstd, with tensors as the engine keeps them, or
what changed in them."""

import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sgl_fp8rl.formats import DTYPES, by_tensor, format_of, split_name
from sgl_fp8rl.formats.weight_format import WEIGHT_DTYPES, Encoded
from sgl_fp8rl.ops.delta import difference
from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import ManifestError, describe
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.values import attempt
from trainer_bridge.chain.index import ChainError, Link, Part, brief, read_index, replace

PART_BYTES = 1 << 30
"""A version is written in files of about so many bytes, since one is made in memory."""
LEVEL, THREADS = 1, 4
"""Of zstd. Codes hold little that a higher level finds: its entropy coder does the work."""

DELTA = "delta:"
"""Before the name of a tensor that is given by what changed in it (``ops/delta.py``)."""

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


class VersionWriter:
    """One version as it is written.

    Args:
        layout: of the engine whose formats are used.
        is_anchor: whether it is written whole besides.
    """

    def __init__(
        self,
        folder: Path,
        policy: Policy,
        serial: int,
        layout: dict[str, Any],
        before: Tensors,
        is_anchor: bool,
        kv_scales: torch.Tensor | None,
    ) -> None:
        read = ("dtype", "fp32", "formats", "skipped", "tied")
        self.layout = {name: layout[name] for name in read}
        self.tensors: Tensors = {}
        self._folder, self._policy, self._serial, self._before = folder, policy, serial, before
        self._formats = by_tensor(layout["formats"])
        self._delta = PartWriter(folder, f"{serial}-delta") if before else None
        self._anchor = PartWriter(folder, f"{serial}-anchor") if is_anchor else None
        scales = before.get(KV_SCALES) if kv_scales is None else kv_scales
        if scales is not None:
            self._put(KV_SCALES, scales.detach().to("cpu", copy=True))

    def put(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Add a tensor of the checkpoint, in this dtype.

        Raises:
            ManifestError: it holds what no engine takes.
        """
        if name == KV_SCALES:
            raise ManifestError(f"{KV_SCALES} is not a tensor of a checkpoint; pass kv_scales")
        try:
            encoded = self._encoded(name, tensor.to(dtype))
        except KeyError as error:
            known = ", ".join(DTYPES)
            raise ManifestError(f"{name} has dtype {tensor.dtype}; send one of {known}") from error
        except ValueError as error:
            raise ManifestError(f"{name} {error}") from error
        for suffix, part in encoded.items():
            self._put(name + suffix, part)

    def _encoded(self, name: str, tensor: torch.Tensor) -> Encoded:
        """As the engine keeps it: checked, on the CPU, in memory of its own."""
        format_ = self._formats.get(name)
        if format_ is not None and tensor.dtype in WEIGHT_DTYPES:
            return {suffix: part.cpu() for suffix, part in format_.encode(tensor).items()}
        owner, suffix = split_name(name)
        if suffix and owner in self._formats:
            self._formats[owner].check_values(suffix, tensor)
        else:
            format_of(tensor.dtype).check_values("", tensor)
        return {"": tensor.to("cpu", copy=True)}

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        if name in self.tensors:
            raise ManifestError(f"{name} comes twice; give each tensor once")
        self.tensors[name] = tensor = tensor.contiguous()
        if self._anchor is not None:
            self._anchor.put(name, tensor)
        if self._delta is not None:
            put_change(self._delta, name, self._before.get(name), tensor)

    def finish(self, base: int) -> Link:
        """The version, all files of which are on disk.

        Raises:
            ManifestError: it has other tensors than the version before.
        """
        weights = {name: t for name, t in self.tensors.items() if name != KV_SCALES}
        describe(weights.items())
        if self._before and (odd := (self._before.keys() - {KV_SCALES}) ^ weights.keys()):
            raise ManifestError(
                f"{min(odd)} is only in one of the last two versions; publish another model in "
                f"another folder"
            )
        delta, anchor = (w.finish() if w is not None else () for w in (self._delta, self._anchor))
        of_all = digest(self.tensors)
        base = base if delta else 0
        return Link(self._serial, *self._policy, of_all, base, delta, anchor)

    def delete(self) -> None:
        """Delete its files, unless the index has them already."""
        index, _ = attempt(read_index, self._folder)
        if index is None:
            return  # which version it ends with is not known
        written = [w.parts for w in (self._delta, self._anchor) if w is not None]
        for name in {part.name for parts in written for part in parts} - index.parts:
            (self._folder / name).unlink(missing_ok=True)


def put_change(writer: PartWriter, name: str, old: torch.Tensor | None, new: torch.Tensor) -> None:
    """Write what makes a tensor out of an old one: nothing where they are equal, or all of it where
    that is less than a delta, or not much more."""
    change = None
    if old is not None and (old.shape, old.dtype) == (new.shape, new.dtype):
        if torch.equal(as_bytes(old), as_bytes(new)):
            return
        change = difference(as_bytes(old), as_bytes(new))
    if change is None:
        writer.put(name, new)
    else:
        writer.put(DELTA + name, change)


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
