"""Blocks whose rows lie on several ranks of a trainer: put together, then quantized as one.

FSDP2 shards by rows and knows no blocks: of a projection of 1024 rows, each of 16 ranks holds half
of a block.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sgl_fp8rl.protocol.chunks import ALIGNMENT, Piece, RowRange

JOINED_BYTES = 32 << 20
"""Device memory in which blocks are put together, in turn; a block of 128 rows has 6.5 MB where
rows have 25,600 elements in BF16."""


class CutBlock(NamedTuple):
    """Rows of a tensor that share a block."""

    name: str
    rows: RowRange
    parts: list[Piece]
    """In order."""
    nbytes: int


def at_blocks(
    name: str, pieces: Sequence[Piece], step: int, row_bytes: int
) -> tuple[list[Piece], list[CutBlock]]:
    """Pieces that begin and end where blocks do, and the blocks of which several hold rows.

    Args:
        pieces: all of the tensor, in order.
        step: rows of a block.
        row_bytes: of the tensor.
    """
    length = pieces[-1].rows[1]
    whole: list[Piece] = []
    cut: dict[int, list[Piece]] = defaultdict(list)
    for piece in pieces:
        first, last = piece.rows
        low = min(-(-first // step) * step, last)
        high = max(last if last == length else last // step * step, low)
        for start, stop, is_cut in ((first, low, True), (low, high, False), (high, last, True)):
            if start < stop:
                offset = piece.offset + (start - first) * row_bytes
                rows = Piece(piece.segment, offset, (start, stop))
                (cut[start // step] if is_cut else whole).append(rows)
    return whole, [
        CutBlock(
            name,
            (parts[0].rows[0], parts[-1].rows[1]),
            parts,
            (parts[-1].rows[1] - parts[0].rows[0]) * row_bytes,
        )
        for parts in cut.values()
    ]


def in_turn(blocks: Iterable[CutBlock]) -> list[list[tuple[int, CutBlock]]]:
    """Batches of blocks that fit there together, each with its offset in bytes."""
    batches: list[list[tuple[int, CutBlock]]] = []
    used = JOINED_BYTES
    for block in blocks:
        if used + block.nbytes > JOINED_BYTES:
            batches.append([])
            used = 0
        batches[-1].append((used, block))
        used += -(-block.nbytes // ALIGNMENT) * ALIGNMENT
    return batches
