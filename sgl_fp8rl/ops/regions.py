"""Boxes inside of tensors: the geometry that routes and copies share."""

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import torch

Span = tuple[int, int]
"""Start and stop along one dimension."""
Region = tuple[Span, ...]
"""A box inside a tensor: one span for each dimension."""


def whole(shape: tuple[int, ...]) -> Region:
    """The box that is all of a tensor."""
    return tuple((0, size) for size in shape)


def sizes(region: Region) -> tuple[int, ...]:
    """Length along each dimension."""
    return tuple(stop - start for start, stop in region)


def numel(region: Region) -> int:
    """Elements in the box."""
    return math.prod(sizes(region))


def view(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """The box as a view."""
    return tensor[tuple(slice(start, stop) for start, stop in region)]


def inside(region: Region, around: Region) -> Region:
    """The box as one of the box around it."""
    return tuple((a - b, c - b) for (a, c), (b, _) in zip(region, around, strict=True))


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def as_region(
    shape: tuple[int, ...], offset: int, sizes_: tuple[int, ...], strides: tuple[int, ...]
) -> Region | None:
    """The box that a strided view covers in a contiguous tensor, or None if it covers no box.

    Args:
        shape: the contiguous tensor's shape.
        offset, sizes_, strides: the view, in elements.
    """
    kept = [(s, st) for s, st in zip(sizes_, strides, strict=True) if s != 1]
    if len(kept) == 1 and kept[0] == (math.prod(shape), 1) and offset == 0:
        return whole(shape)  # flattened
    region: list[Span] = []
    step = math.prod(shape)
    for size in shape:
        step //= size
        start, offset = divmod(offset, step)
        length = 1
        if kept and kept[0][1] == step and size != 1:
            length = kept.pop(0)[0]
        if start + length > size:
            return None
        region.append((start, start + length))
    return None if kept or offset else tuple(region)


def overlap(regions: list[Region]) -> bool:
    """Whether any two boxes of one tensor share an element."""

    def pairs(group: list[Region]) -> Iterator[tuple[Region, Region]]:
        return ((a, b) for i, a in enumerate(group) for b in group[i + 1 :])

    if len(regions) < 2:
        return False
    if not regions[0]:
        return True  # a scalar, written twice
    by_first: dict[Span, list[Region]] = defaultdict(list)
    for region in regions:
        by_first[region[0]].append(region)
    apart = all(a[1] <= b[0] for a, b in pairwise(sorted(by_first)))
    # boxes that are apart along the first dimension, such as experts, need no look at each pair
    groups = list(by_first.values()) if apart else [regions]
    return any(
        all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(one, other, strict=True))
        for group in groups
        for one, other in pairs(group)
    )
