"""The one builder of copy descriptors: trainer and engine describe their copies with it."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch

from sgl_fp8rl.ops.copy_descriptors import CopyDescriptor
from sgl_fp8rl.ops.regions import Region

Dimension = tuple[int, int, int]
"""(length, source stride, target stride), in elements."""


class Placed(NamedTuple):
    """A tensor where a kernel finds it."""

    address: int
    """Bytes; of a source, from the base of its segment."""
    dtype: torch.dtype
    strides: tuple[int, ...]
    """Elements."""


class Scales(NamedTuple):
    """The scales of a target that is quantized into, and their box."""

    placed: Placed
    region: Region


def describe_copy(
    source: Placed,
    src: Region,
    target: Placed,
    dst: Region,
    scales: Scales | None = None,
    *,
    segment: int = 0,
    positive: bool = False,
    tag: int = 0,
    power_of_two: bool = False,
) -> Iterator[CopyDescriptor]:
    """A copy of one box to another, cut into matrices: one descriptor for each.

    Args:
        src, dst: boxes of equal sizes; dimensions of length 1 may stand on one side only.
        scales: None where nothing is quantized.
        segment, positive, tag, power_of_two: see ``CopyDescriptor``.
    """
    dimensions = _dimensions(src, dst, source.strides, target.strides)
    scale_steps: list[int] = []
    if scales is not None:
        # the last two dimensions are the matrix that blocks are cut from; others may be experts
        lead, (rows, cols) = dimensions[:-2], dimensions[-2:]
        steps = _dimensions(src, dst, source.strides, scales.placed.strides)[:-2]
        scale_steps = [step for _, _, step in steps]
    else:
        *lead, rows, cols = [(1, 0, 0), (1, 0, 0), *_merged(dimensions)]
        lead = [d for d in lead if d[0] != 1]
        if (cols[1], cols[2]) != (1, 1):  # a single column
            lead, rows, cols = [*lead, rows], cols, (1, 1, 1)
            lead = [d for d in lead if d[0] != 1]
    first = CopyDescriptor(
        segment=segment,
        source=_address(source, src),
        target=_address(target, dst),
        scales=_address(*scales) if scales else 0,
        rows=rows[0],
        cols=cols[0],
        source_stride=rows[1],
        target_stride=rows[2],
        scale_stride=scales.placed.strides[-2] if scales else 0,
        source_dtype=source.dtype,
        target_dtype=target.dtype,
        positive=positive,
        tag=tag,
        power_of_two=power_of_two,
    )
    for index in product(*(range(length) for length, _, _ in lead)):
        yield first._replace(
            source=first.source + _dot(index, [d[1] for d in lead]) * source.dtype.itemsize,
            target=first.target + _dot(index, [d[2] for d in lead]) * target.dtype.itemsize,
            scales=first.scales + _dot(index, scale_steps) * scales.placed.dtype.itemsize
            if scales
            else 0,
        )


def _address(placed: Placed, region: Region) -> int:
    start = _dot([start for start, _ in region], placed.strides)
    return placed.address + start * placed.dtype.itemsize


def _dimensions(
    src: Region, dst: Region, src_strides: tuple[int, ...], dst_strides: tuple[int, ...]
) -> list[Dimension]:
    """The dimensions of both boxes, paired from the last; missing ones have length 1."""
    width = max(len(src), len(dst))

    def padded(region: Region, strides: tuple[int, ...]) -> list[tuple[int, int]]:
        lengths = [stop - start for start, stop in region]
        given = list(zip(lengths, strides, strict=True))
        return [(1, 0)] * (width - len(given)) + given

    sources, targets = padded(src, src_strides), padded(dst, dst_strides)
    if [length for length, _ in sources] == [length for length, _ in targets]:
        return [(n, s, t) for (n, s), (_, t) in zip(sources, targets, strict=True)]
    # a dimension of length 1 stands elsewhere on one side, as an expert does in a stack
    long_sources = [(n, s) for n, s in sources if n != 1]
    long_targets = [(n, t) for n, t in targets if n != 1]
    return [(n, s, t) for (n, s), (_, t) in zip(long_sources, long_targets, strict=True)]


def _merged(dimensions: list[Dimension]) -> list[Dimension]:
    """Join neighbours that are contiguous on both sides; dimensions of length 1 are dropped."""
    merged: list[Dimension] = []
    for length, source, target in dimensions:
        if length == 1:
            continue
        if merged and merged[-1][1:] == (length * source, length * target):
            length *= merged.pop()[0]
        merged.append((length, source, target))
    return merged or [(1, 1, 1)]


def _dot(a: tuple[int, ...] | list[int], b: tuple[int, ...] | list[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))
