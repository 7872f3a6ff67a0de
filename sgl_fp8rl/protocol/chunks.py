"""Chunks: how the tensors of a manifest fill the two halves of a bucket in turn.

Trainer and engine cut the same manifest in the same way, so the wire carries the number of a chunk
and nothing of what lies where.
"""

from typing import NamedTuple

from sgl_fp8rl.ops.reference import BLOCK, FP8_DTYPE
from sgl_fp8rl.protocol.manifest import SCALE_SUFFIX, Manifest, ManifestError

ALIGNMENT = 64
"""Bytes; every slice starts at a multiple of it, so that kernels read 16 bytes at a time."""

RowRange = tuple[int, int]
"""Start and stop along a tensor's first dimension."""


class ChunkSlice(NamedTuple):
    """Rows of one tensor, contiguous."""

    name: str
    rows: RowRange
    offset: int
    """Bytes from the start of the bucket; -1 where the slice lies in the trainer's memory."""


def cut_into_chunks(manifest: Manifest) -> list[list[ChunkSlice]]:
    """The chunks of an update in the order in which they are written.

    Chunk ``i`` lies in half ``i % 2`` of the bucket. Codes travel with their scales: rows of both
    are in one chunk, the scales right behind. What is mapped makes one more chunk, the last.

    Raises:
        ManifestError: a row block of some tensor is larger than half of the bucket.
    """
    chunks: list[list[ChunkSlice]] = [[]]
    fill = 0
    for name, spec in manifest.tensors.items():
        codes = name.removesuffix(SCALE_SUFFIX)
        if name in manifest.mapped or (manifest.is_scale(name) and codes not in manifest.mapped):
            continue
        columns = [_column(manifest, name)]
        if spec.dtype == FP8_DTYPE and name + SCALE_SUFFIX not in manifest.mapped:
            columns.append(_column(manifest, name + SCALE_SUFFIX, len(spec.shape) == 2))
        start, length = 0, spec.shape[0] if spec.shape else 1
        step = BLOCK if len(spec.shape) == 2 else 1
        while start < length:
            free = manifest.chunk_bytes - fill
            stop = length
            if sum(column.nbytes(start, stop) for column in columns) > free:
                # what the alignment of two slices may cost is left free
                free -= ALIGNMENT * (len(columns) - 1)
                steps = max(free, 0) // sum(column.nbytes_raw(step) for column in columns)
                stop = start + steps * step
                if stop == start and fill == 0:
                    step = min(step, length)
                    needed = sum(column.nbytes_raw(step) for column in columns)
                    needed += ALIGNMENT * (len(columns) - 1)
                    raise ManifestError(
                        f"{step} rows of {name} need {needed} bytes, more than half of the "
                        f"engine's bucket; start the engine with a larger --fp8rl-bucket-bytes"
                    )
            for column in columns if stop > start else ():
                half = (len(chunks) - 1) % 2
                chunk_slice = ChunkSlice(
                    column.name, column.rows(start, stop), half * manifest.chunk_bytes + fill
                )
                chunks[-1].append(chunk_slice)
                fill += column.nbytes(start, stop)
            start = stop
            if start < length:
                chunks.append([])
                fill = 0
    if manifest.mapped:
        mapped = [name for name in manifest.tensors if name in manifest.mapped]
        chunks.append([_whole(manifest, name) for name in mapped])
    return [chunk for chunk in chunks if chunk]


class _Column(NamedTuple):
    """One of the tensors that are cut at the same rows: weights, or codes and their scales."""

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


def _column(manifest: Manifest, name: str, in_blocks: bool = False) -> _Column:
    spec = manifest.tensors[name]
    length = spec.shape[0] if spec.shape else 1
    return _Column(name, spec.nbytes // length, BLOCK if in_blocks else 1)


def _whole(manifest: Manifest, name: str) -> ChunkSlice:
    shape = manifest.tensors[name].shape
    return ChunkSlice(name, (0, shape[0] if shape else 1), -1)
