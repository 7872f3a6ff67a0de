"""Chunks: how the tensors of a manifest fill the slots of a bucket in turn.

Trainer and engine cut the same manifest in the same way, so the wire carries the number of a chunk
and nothing of what lies where. Of a stream whose order is not known before, it carries the names
too, in the order in which they came.
"""

import math
from typing import NamedTuple

from sgl_fp8rl.formats import FORMATS, split_name
from sgl_fp8rl.protocol.manifest import Manifest, ManifestError

ALIGNMENT = 64
"""Bytes; every slice starts at a multiple of it, so that kernels read 16 bytes at a time."""

ROW_STEP = math.lcm(*(format_.block[0] for format_ in FORMATS.values()))
"""Rows at whose multiples a matrix is cut: its format in the engine may have other blocks than the
one that it is sent in."""

RowRange = tuple[int, int]
"""Start and stop along a tensor's first dimension."""


class ChunkSlice(NamedTuple):
    """Rows of one tensor, contiguous."""

    name: str
    rows: RowRange
    offset: int
    """Bytes from the start of the bucket; -1 where the slice lies in the trainer's memory."""


class Piece(NamedTuple):
    """Rows of one tensor where they lie together in a trainer's memory."""

    segment: int
    """Index of the allocation."""
    offset: int
    """Bytes from its start."""
    rows: RowRange


class Cutter:
    """Places tensors in chunks, one after the other.

    Chunk ``i`` lies in slot ``i % slots`` of the bucket. Codes travel with their companions: rows
    of both are in one chunk, the companions right behind.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.chunks: list[list[ChunkSlice]] = []
        """Only the last one still grows."""
        self.due = {
            name: None
            for name in manifest.tensors
            if name not in manifest.mapped and not self._follows(manifest, name)
        }
        """Names that were not added yet, without companions that follow their codes, in order."""
        self._manifest = manifest
        self._fill = 0

    def add(self, name: str) -> None:
        """Place a tensor that is due behind the others.

        Raises:
            ManifestError: one of its row blocks is larger than a slot of the bucket.
        """
        del self.due[name]
        manifest = self._manifest
        spec, format_ = manifest.tensors[name], manifest.format_of(name)
        per_row = format_.block[0] if len(spec.shape) == 2 else 1
        columns = [_column(manifest, name)]
        for companion in (name + suffix for suffix in format_.suffixes):
            if companion not in manifest.mapped:
                columns.append(_column(manifest, companion, per_row))
        start, length = 0, spec.shape[0] if spec.shape else 1
        step = ROW_STEP if len(spec.shape) == 2 else 1
        while start < length:
            if not self.chunks:
                self.chunks.append([])
            free = manifest.chunk_bytes - self._fill
            stop = length
            if sum(column.nbytes(start, stop) for column in columns) > free:
                # what the alignment of two slices may cost is left free
                free -= ALIGNMENT * (len(columns) - 1)
                steps = max(free, 0) // sum(column.nbytes_raw(step) for column in columns)
                stop = start + steps * step
                if stop == start and self._fill == 0:
                    step = min(step, length)
                    needed = sum(column.nbytes_raw(step) for column in columns)
                    needed += ALIGNMENT * (len(columns) - 1)
                    raise ManifestError(
                        f"{step} rows of {name} need {needed} bytes, and a chunk of the engine's "
                        f"bucket holds {manifest.chunk_bytes}; start the engine with a larger "
                        f"--fp8rl-bucket-bytes"
                    )
            for column in columns if stop > start else ():
                slot = (len(self.chunks) - 1) % manifest.slots
                chunk_slice = ChunkSlice(
                    column.name, column.rows(start, stop), slot * manifest.chunk_bytes + self._fill
                )
                self.chunks[-1].append(chunk_slice)
                self._fill += column.nbytes(start, stop)
            start = stop
            if start < length:
                self.chunks.append([])
                self._fill = 0

    @staticmethod
    def _follows(manifest: Manifest, name: str) -> bool:
        return manifest.is_companion(name) and split_name(name)[0] not in manifest.mapped


def cut_into_chunks(manifest: Manifest) -> list[list[ChunkSlice]]:
    """The chunks of an update in the order in which they are written.

    Mapped tensors make one last chunk.

    Raises:
        ManifestError: a row block of some tensor is larger than a slot of the bucket.
    """
    cutter = Cutter(manifest)
    for name in list(cutter.due):
        cutter.add(name)
    if not manifest.mapped:
        return cutter.chunks
    mapped = [name for name in manifest.tensors if name in manifest.mapped]
    return [*cutter.chunks, [_whole(manifest, name) for name in mapped]]


class _Column(NamedTuple):
    """One of the tensors that are cut at the same rows: codes or a companion."""

    name: str
    row_bytes: int
    per_row: int
    """Rows of the codes for each row of this tensor."""

    def rows(self, start: int, stop: int) -> RowRange:
        return start // self.per_row, -(-stop // self.per_row)

    def nbytes_raw(self, rows: int) -> int:
        return -(-rows // self.per_row) * self.row_bytes

    def nbytes(self, start: int, stop: int) -> int:
        first, last = self.rows(start, stop)
        return -(-(last - first) * self.row_bytes // ALIGNMENT) * ALIGNMENT


def _column(manifest: Manifest, name: str, per_row: int = 1) -> _Column:
    spec = manifest.tensors[name]
    length = spec.shape[0] if spec.shape else 1
    return _Column(name, spec.nbytes // length, per_row)


def _whole(manifest: Manifest, name: str) -> ChunkSlice:
    shape = manifest.tensors[name].shape
    return ChunkSlice(name, (0, shape[0] if shape else 1), -1)
