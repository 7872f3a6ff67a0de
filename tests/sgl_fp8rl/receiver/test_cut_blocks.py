"""Blocks that several ranks of a trainer hold: what is put together, and where."""

from itertools import pairwise

import hypothesis.strategies as st
from hypothesis import given

from sgl_fp8rl.protocol.chunks import ALIGNMENT, Piece
from sgl_fp8rl.receiver.writers.cut_blocks import JOINED_BYTES, CutBlock, at_blocks, in_turn

ROW_BYTES = 6


@st.composite
def cut_anywhere(draw: st.DrawFn) -> tuple[list[Piece], int]:
    """Pieces of a tensor, each in a segment of its own, and the rows of a block."""
    length = draw(st.integers(1, 40))
    cuts = sorted(draw(st.sets(st.integers(1, length), max_size=6)) | {0, length})
    ranges = list(pairwise(cuts))
    pieces = [Piece(i, draw(st.integers(0, 100)), rows) for i, rows in enumerate(ranges)]
    return pieces, draw(st.integers(1, 9))


def rows_of(piece: Piece) -> list[tuple[int, int]]:
    """(Segment, offset) of each row, by the piece."""
    first, last = piece.rows
    return [(piece.segment, piece.offset + i * ROW_BYTES) for i in range(last - first)]


@given(cut_anywhere())
def test_each_row_is_read_once_and_no_block_is_cut(drawn: tuple[list[Piece], int]) -> None:
    pieces, step = drawn
    length = pieces[-1].rows[1]
    whole, blocks = at_blocks("w", pieces, step, ROW_BYTES)
    for piece in whole:
        assert piece.rows[0] % step == 0 and (piece.rows[1] % step == 0 or piece.rows[1] == length)
    for block in blocks:
        first, last = block.rows
        assert first % step == 0 and last == min(first + step, length)
        assert block.nbytes == (last - first) * ROW_BYTES
        assert len(block.parts) > 1, "a block of one piece needs no help"
        assert [first, *(p.rows[1] for p in block.parts)] == [
            *(p.rows[0] for p in block.parts),
            last,
        ]
    parts = sorted([*whole, *(p for b in blocks for p in b.parts)], key=lambda piece: piece.rows)
    assert [at for p in parts for at in rows_of(p)] == [at for p in pieces for at in rows_of(p)]


@given(st.lists(st.integers(1, JOINED_BYTES), max_size=20))
def test_batches_fit_the_stage_and_keep_their_order(sizes: list[int]) -> None:
    blocks = [CutBlock(f"{i}", (0, 1), [], size) for i, size in enumerate(sizes)]
    batches = in_turn(blocks)
    assert [block for batch in batches for _, block in batch] == blocks
    for batch in batches:
        ends = [0, *(offset + block.nbytes for offset, block in batch)]
        assert ends[-1] <= JOINED_BYTES
        for (offset, _), end in zip(batch, ends, strict=False):
            assert offset % ALIGNMENT == 0 and end <= offset < end + ALIGNMENT
