"""Where the elements of a padded matrix lie, and that padding changes no result."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_fp8rl.formats import BLOCK_FP8
from sgl_fp8rl.formats.padding import Shard, fit, fit_experts
from sgl_fp8rl.ops.reference import fp8_linear
from sgl_fp8rl.ops.regions import numel, overlap, view
from tests import oracle

SIZES = st.integers(1, 700)


@st.composite
def shards(draw: st.DrawFn) -> Shard:
    count = draw(st.sampled_from([1, 2, 3, 4]))
    return Shard(draw(SIZES), draw(st.integers(0, count - 1)), count)


@given(st.lists(shards(), min_size=1, max_size=3), shards())
def test_every_element_has_its_place_in_its_block(rows: list[Shard], cols: Shard) -> None:
    padding, reason = fit(BLOCK_FP8, rows, cols)
    if padding is None:
        return
    assert reason is None
    for side, parts in ((padding.rows, rows), (padding.cols, [cols])):
        assert side.length == sum(part.size for part in parts)
        for (start, stop), part in zip(side.spans, parts, strict=True):
            assert start % 128 == part.size * part.index % 128 and stop - start == part.size
        blocks = [(start // 128, -(-stop // 128)) for start, stop in side.spans]
        assert all(a[1] <= b[0] for a, b in pairwise(blocks)), "no block has two parts"
        assert blocks[-1][1] <= -(-side.size // 128)
    assert padding.cols.size % 128 == 0
    held = [(r, c) for r in padding.rows.spans for c in padding.cols.spans]
    boxes = [*held, *padding.gaps()]
    assert sum(map(numel, boxes)) == padding.rows.size * padding.cols.size and not overlap(boxes)


@given(shards())
def test_all_ranks_store_the_same_shape(shard: Shard) -> None:
    found = [
        fit(BLOCK_FP8, [each, each], Shard(256))
        for each in (Shard(shard.size, rank, shard.count) for rank in range(shard.count))
    ]
    assert len({padding and padding.shape for padding, _ in found}) == 1
    assert len({reason for _, reason in found}) == 1


@given(st.lists(SIZES, min_size=1, max_size=3), st.data())
def test_a_copy_is_placed_part_by_part(sizes: list[int], data: st.DataObject) -> None:
    padding, _ = fit(BLOCK_FP8, [Shard(size) for size in sizes], Shard(128))
    if padding is None:
        return
    rows, logical = padding.rows, torch.arange(1, sum(sizes) + 1)
    start = data.draw(st.integers(0, sum(sizes) - 1))
    stop = data.draw(st.integers(start + 1, sum(sizes)))
    stored = torch.zeros(rows.size, dtype=torch.long)
    for src, dst in rows.place((0, stop - start), (start, stop)):
        stored[slice(*dst)] = logical[start:stop][slice(*src)]
    assert rows.cut(stored).tolist() == [
        value if start <= i < stop else 0 for i, value in enumerate(logical.tolist())
    ]


NEAR = 1 / 256
"""Of the largest result. Measured: 0.0018, the rounding to BF16."""
SHAPES = [  # rows of each part, columns, rank and ranks of rows, of columns
    ([576, 192, 192], 576, (0, 1), (0, 1)),
    ([448, 64, 64], 896, (1, 2), (0, 1)),
    ([896], 448, (0, 1), (1, 2)),
    ([1000], 300, (0, 1), (0, 1)),
    ([608, 608], 896, (1, 2), (0, 1)),
]


@pytest.mark.parametrize(("rows", "cols", "at_rows", "at_cols"), SHAPES)
def test_a_padded_layer_computes_its_own_part_of_the_whole(
    rows: list[int], cols: int, at_rows: tuple[int, int], at_cols: tuple[int, int]
) -> None:
    """From codes and scales of the whole tensors; zeros cost nothing."""
    padding, _ = fit(BLOCK_FP8, [Shard(size, *at_rows) for size in rows], Shard(cols, *at_cols))
    assert padding is not None
    random = torch.Generator().manual_seed(0)
    x = torch.randn(5, cols, generator=random).bfloat16()
    codes = torch.zeros(padding.shape).to(torch.float8_e4m3fn)
    scales = torch.ones(padding.in_blocks(BLOCK_FP8.block).shape)
    held = []
    for span, size in zip(padding.rows.spans, rows, strict=True):
        shape = size * at_rows[1], cols * at_cols[1]
        whole = oracle.quantize_weight(torch.randn(shape, generator=random).numpy())
        box = [(i * n, i * n + n) for n, (i, _) in ((size, at_rows), (cols, at_cols))]
        blocks = [(start // 128, -(-stop // 128)) for start, stop in box]
        part = torch.from_numpy(whole[0]).view(torch.float8_e4m3fn)
        view(codes, (span, padding.cols.spans[0])).copy_(view(part, tuple(box)))
        to = [s // 128 for s, _ in (span, padding.cols.spans[0])]
        area = tuple((a, a + stop - start) for a, (start, stop) in zip(to, blocks, strict=True))
        view(scales, area).copy_(view(torch.from_numpy(whole[1]), tuple(blocks)))
        held.append(view(torch.from_numpy(oracle.dequantize_weight(*whole)), tuple(box)))
    y = padding.rows.cut(fp8_linear(padding.cols.pad(x), codes, scales))

    lead = cols * at_cols[0] % 128
    padded = np.pad(x.float().numpy(), ((0, 0), (lead, -(lead + cols) % 128)))
    quantized = oracle.dequantize_activation(*oracle.quantize_activation(padded))
    weights = torch.cat(held).numpy()
    wanted = quantized[:, lead : lead + cols] @ weights.T
    assert y.shape == wanted.shape and y.is_contiguous()
    top = np.abs(wanted).max()
    assert np.abs(y.double().numpy() - wanted).max() / top < NEAR
    # the control: activations that stand one channel further on
    shifted = np.roll(quantized, 1, -1)[:, lead : lead + cols] @ weights.T
    assert np.abs(shifted - wanted).max() / top > 10 * NEAR


def test_what_is_not_padded() -> None:
    assert fit(BLOCK_FP8, [Shard(256), Shard(128)], Shard(512)) == (None, None)
    assert fit(BLOCK_FP8, [Shard(576)], Shard(1536)) == (None, None), "kernels end where rows do"
    padding, reason = fit(BLOCK_FP8, [Shard(64), Shard(64)], Shard(256))
    assert padding is None and reason is not None
    assert "64+64 x 256" in reason and "256x256" in reason


def test_experts_meet_in_the_middle() -> None:
    """The products of gate and up have the places of the columns that they are multiplied with."""
    for rank in range(4):
        found, reason = fit_experts(BLOCK_FP8, 2048, Shard(192, rank, 4))
        assert found is not None and reason is None
        up, down = found
        assert (up.shape, down.shape) == ((512, 2048), (2048, 256))
        (gate, other), (cols,) = up.rows.spans, down.cols.spans
        assert gate == cols and other == (cols[0] + 256, cols[1] + 256)
    assert fit_experts(BLOCK_FP8, 2048, Shard(768)) == (None, None)
    assert fit_experts(BLOCK_FP8, 2000, Shard(192))[1] == BLOCK_FP8.refusal([192], 2000)
    assert "no smaller" in str(fit_experts(BLOCK_FP8, 2048, Shard(96, 1, 8))[1])
