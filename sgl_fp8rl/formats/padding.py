"""Padded storage: a rank's matrix whose sides do not begin or end where blocks do.

Blocks are those of the whole tensor, on any number of ranks, so codes and scales are too. A rank
has storage for every block that it holds elements of. They lie there as in the tensor, behind the
elements of other ranks in the first block; zeros are in the place of all elements that are not its
own. Of several matrices that are stacked, each begins with a block of storage.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F

from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.ops.regions import Region, Span

BF16_BYTES = 2


@dataclass(frozen=True)
class Shard:
    """The part of a side that a rank keeps, of ``count`` equal ones."""

    size: int
    index: int = 0
    count: int = 1


class Side(NamedTuple):
    """The rows or the columns of a stored matrix."""

    spans: tuple[Span, ...]
    """Where the elements of each stacked part lie, in order."""
    size: int
    """Of the storage."""

    @property
    def length(self) -> int:
        """Elements without padding."""
        return sum(stop - start for start, stop in self.spans)

    @property
    def is_padded(self) -> bool:
        return self.length != self.size

    def place(self, source: Span, target: Span) -> Iterator[tuple[Span, Span]]:
        """Where a copy to ``target``, which counts elements, goes in storage, part by part."""
        begin = 0
        for start, stop in self.spans:
            end = begin + stop - start
            low, high = max(begin, target[0]), min(end, target[1])
            if low < high:
                first = source[0] + low - target[0]
                yield (first, first + high - low), (start + low - begin, start + high - begin)
            begin = end

    def gaps(self) -> Iterator[Span]:
        """What of the storage holds no elements."""
        begin = 0
        for start, stop in (*self.spans, (self.size, self.size)):
            if begin < start:
                yield begin, start
            begin = stop

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """``[..., length]`` to ``[..., size]`` with zeros; of one part."""
        ((start, stop),) = self.spans
        return F.pad(x, (start, self.size - stop)) if self.is_padded else x

    def cut(self, y: torch.Tensor) -> torch.Tensor:
        """``[..., size]`` to ``[..., length]``, contiguous."""
        if not self.is_padded:
            return y
        return torch.cat([y[..., start:stop] for start, stop in self.spans], -1)


@dataclass(frozen=True)
class Padding:
    """How a matrix, or each matrix of a stack, lies in its storage."""

    rows: Side
    cols: Side

    @property
    def is_none(self) -> bool:
        return not (self.rows.is_padded or self.cols.is_padded)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the storage."""
        return self.rows.size, self.cols.size

    @property
    def unpadded(self) -> tuple[int, int]:
        return self.rows.length, self.cols.length

    def place(self, source: Region, target: Region) -> Iterator[tuple[Region, Region]]:
        """The boxes of a copy to a box of the unpadded matrix, or of a stack of these.

        Args:
            source, target: at least two dimensions, the last two of equal sizes.
        """
        for (from_rows, to_rows), (from_cols, to_cols) in product(
            self.rows.place(source[-2], target[-2]), self.cols.place(source[-1], target[-1])
        ):
            yield (*source[:-2], from_rows, from_cols), (*target[:-2], to_rows, to_cols)

    def gaps(self) -> Iterator[tuple[Span, Span]]:
        """The boxes of the storage that hold no elements."""
        for rows in self.rows.gaps():
            yield rows, (0, self.cols.size)
        yield from product(self.rows.spans, self.cols.gaps())

    def in_blocks(self, block: tuple[int, int]) -> "Padding":
        """The same of a companion with an element for each block."""
        return Padding(_in_blocks(self.rows, block[0]), _in_blocks(self.cols, block[1]))


def pad_storage(
    codes: torch.Tensor, companion: torch.Tensor, padding: Padding, block: tuple[int, int]
) -> None:
    """Give parameters that were made for ``[..., *unpadded]`` the storage of ``[..., *shape]``."""
    for parameter, stored in ((codes, padding), (companion, padding.in_blocks(block))):
        if parameter.shape[-2:] != stored.shape:
            parameter.data = parameter.data.new_zeros((*parameter.shape[:-2], *stored.shape))
    codes.fp8rl_padding = padding  # type: ignore[attr-defined]


def padding_of(parameter: torch.Tensor) -> Padding | None:
    """How the parameter's elements lie in its storage, where they are not all of it."""
    return getattr(parameter, "fp8rl_padding", None)


def fit(
    format_: WeightFormat, rows: Sequence[Shard], cols: Shard
) -> tuple[Padding | None, str | None]:
    """The padding with which a layer is stored in a format, if it needs any, or why it is not.

    Args:
        rows: of each matrix that is stacked into the layer.
    """
    if len(rows) == 1 and rows[0].size < format_.block[0]:  # a router, or another small matrix
        return None, f"size {rows[0].size} x {cols.size} on this rank is less than a block of rows"
    padding = Padding(_rows(rows, format_.block[0]), _side([cols], format_.block[1]))
    nbytes = math.prod(padding.shape) * format_.dtypes[0].itemsize
    if nbytes >= math.prod(padding.unpadded) * BF16_BYTES:
        stacked = "+".join(str(each.size) for each in rows)
        stored = "x".join(map(str, padding.shape))
        return None, f"size {stacked} x {cols.size}, padded to {stored}, is no smaller than in BF16"
    return (None if padding.is_none else padding), None


def fit_experts(
    format_: WeightFormat, hidden: int, shard: Shard
) -> tuple[tuple[Padding, Padding] | None, str | None]:
    """As ``fit``, of gate and up stacked, ``[2I, H]``, and of down, ``[H, I]``.

    The products of gate and up lie as the columns of down do, and are zeros in the padding.

    Args:
        shard: of I.
    """
    refused = format_.refusal([shard.size], hidden)
    if refused is None or hidden % format_.block[1]:
        return None, refused
    up, refused = fit(format_, [shard, shard], Shard(hidden))
    down, _ = fit(format_, [Shard(hidden)], shard)
    return (None, refused) if up is None or down is None else ((up, down), None)


def _rows(shards: Sequence[Shard], block: int) -> Side:
    if len(shards) == 1 and _leads(shards[0], block) == {0}:
        return Side(((0, shards[0].size),), shards[0].size)  # kernels take any number of rows
    return _side(shards, block)


def _side(shards: Sequence[Shard], block: int) -> Side:
    spans: list[Span] = []
    begin = 0
    for shard in shards:
        start = begin + shard.index * shard.size % block
        spans.append((start, start + shard.size))
        # the same on all ranks, so that their kernels are
        begin += max(-(-(lead + shard.size) // block) for lead in _leads(shard, block)) * block
    return Side(tuple(spans), begin)


def _leads(shard: Shard, block: int) -> set[int]:
    """Elements of other ranks in the first block of each rank."""
    return {index * shard.size % block for index in range(shard.count)}


def _in_blocks(side: Side, block: int) -> Side:
    spans = tuple((start // block, -(-stop // block)) for start, stop in side.spans)
    return Side(spans, -(-side.size // block))
