"""Which rank of a trainer holds which elements of a sharded parameter.

FSDP2 shards by rows, so each rank holds one range of elements of the flattened parameter. Other
placements are gathered.
"""

from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer_bridge.sources.parameters import Named

Range = tuple[int, int]
"""(First, last + 1) of the elements that a rank holds; equal where it holds none."""
Owners = list[dict[int, Range] | None]
"""For each parameter the range that is read of each rank, or None where it is gathered."""


def held_here(named: Named) -> list[Range | None]:
    """The range of each parameter that this rank holds; None where it is not sharded by rows."""
    return [
        _range(tensor.shape, tensor.device_mesh, tensor.placements, tensor.to_local().shape)
        if isinstance(tensor, DTensor)
        else None
        for _, tensor in named
    ]


@lru_cache(1024)
def _range(
    shape: torch.Size, mesh: Any, placements: tuple[Any, ...], local: torch.Size
) -> Range | None:
    if any(isinstance(placement, Partial) for placement in placements):
        return None
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    if tuple(sizes) != tuple(local):
        return None  # torch 2.11 errs where TP and FSDP2 both cut rows, and not evenly
    if 0 in sizes:
        return 0, 0
    if tuple(sizes[1:]) != tuple(shape[1:]):
        return None
    row = shape[1:].numel()
    return offsets[0] * row, (offsets[0] + sizes[0]) * row


def assign(held: list[list[Range | None]], sizes: list[int]) -> Owners:
    """Divide the work: each element is read of the first rank that holds it.

    Args:
        held: for each rank, ``held_here``.
        sizes: elements of each parameter.
    """
    owners: Owners = []
    for size, ranges in zip(sizes, zip(*held, strict=True), strict=True):
        first: dict[Range, int] = {}
        for rank, each in enumerate(ranges):
            if each is not None and each[0] < each[1]:
                first.setdefault(each, rank)
        ends = [0, *(stop for _, stop in sorted(first))]
        covers = [start for start, _ in sorted(first)] == ends[:-1] and ends[-1] == size
        owners.append({rank: each for each, rank in first.items()} if covers else None)
    return owners
