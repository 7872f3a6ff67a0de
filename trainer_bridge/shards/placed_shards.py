"""Shards that engines read where they lie, on the GPUs of all ranks of one host.

Each rank tells the one that leads where its shards are. What has not moved since the call before is
read in place; the engine keeps that memory open until the next update.

FSDP2 shards by rows, so each rank holds one range of elements of the flattened parameter. Other
placements are gathered.
"""

from collections import OrderedDict
from collections.abc import Collection
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sgl_fp8rl.formats import QUANTIZED
from sgl_fp8rl.protocol import place
from sgl_fp8rl.protocol.chunks import Piece
from trainer_bridge.ranks.rank_values import exchanged
from trainer_bridge.sources.parameters import PLAIN, Named
from trainer_bridge.transfer.transfer_plan import can_be_mapped
from trainer_bridge.transport.cuda_ipc import Placement, placement_of
from trainer_bridge.transport.rank_client import UnreachableMemoryError

KEPT = 4
"""Models of this process whose places are remembered, and of each rank on the rank that leads."""

Range = tuple[int, int]
"""(First, last + 1) of the elements that a rank holds; equal where it holds none."""
Owners = list[dict[int, Range] | None]
"""For each parameter the range that is read of each rank, or None where it is gathered."""


@exchanged
@dataclass(frozen=True)
class PlacedShards:
    """What one rank holds of a model, and where."""

    host: dict[str, Any]
    ranges: tuple[Range | None, ...]
    """Elements of each parameter; None of one that is not sharded by rows, or cannot be opened."""
    spots: dict[int, int]
    """Parameter -> its index in ``placement``."""
    placement: Placement


@exchanged
class CodesWanted(NamedTuple):
    """What every rank quantizes for the engines."""

    dtype: torch.dtype
    """The engines', to which weights are rounded before."""
    parameters: tuple[int, ...]
    """Their places among the parameters."""
    format: str = QUANTIZED.name
    """The engines', one of ``BLOCKS``."""


ShardReport = PlacedShards | str | None
"""What a rank tells the one that leads; see ``ShardRegistry.place``."""


class Shards:
    """The shards of a model on all ranks.

    Args:
        sizes: elements of each parameter.
    """

    def __init__(self, of_ranks: list[PlacedShards], sizes: list[int]) -> None:
        self.seeds = tuple(each.placement.seed for each in of_ranks)
        self.handles = [handle for each in of_ranks for handle in each.placement.handles]
        self.gpus = {handle.gpu for handle in self.handles}
        self._of_ranks = of_ranks
        self._owners: Owners = assign([list(each.ranges) for each in of_ranks], sizes)
        counts = [len(each.placement.handles) for each in of_ranks]
        self._first_handles = [sum(counts[:rank]) for rank in range(len(counts))]
        self.codes: tuple[CodesWanted, Shards] | None = None
        """Parameters that lie there as codes too: for each, its codes and their scales."""

    def with_codes(self, wanted: CodesWanted, codes: "Shards") -> "Shards":
        """The same, with codes of some parameters beside them."""
        both = copy(self)
        both.codes = wanted, codes
        return both

    def ranges(self, index: int) -> list[Range] | None:
        """The elements of a parameter that each rank has which holds any; None where it is not
        sharded by rows."""
        if self._owners[index] is None:
            return None
        held = (each.ranges[index] for each in self._of_ranks)
        return [each for each in held if each is not None and each[0] < each[1]]

    def pieces(self, index: int, tensor: torch.Tensor) -> list[Piece] | None:
        """Where the rows of an HF tensor lie, by ``handles``; None where a row is cut.

        Args:
            tensor: a meta view of that parameter, in its own dtype.
        """
        # KV scales come behind the parameters
        owners = self._owners[index] if index < len(self._owners) else None
        if owners is None:
            return None
        first = int(tensor.storage_offset())
        row = tensor.numel() // (tensor.shape[0] if tensor.dim() else 1)
        found: list[Piece] = []
        for rank, (start, stop) in sorted(owners.items(), key=lambda each: each[1]):
            low, high = max(start, first), min(stop, first + tensor.numel())
            if low >= high:
                continue
            if (low - first) % row:
                return None
            shards = self._of_ranks[rank]
            segment, offset = shards.placement.spots[shards.spots[index]]
            found.append(
                Piece(
                    self._first_handles[rank] + segment,
                    offset + (low - start) * tensor.dtype.itemsize,
                    ((low - first) // row, (high - first) // row),
                )
            )
        return found


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


class ShardRegistry:
    """Where shards lay at the last calls: on each rank its own, and on the leader those of all."""

    def __init__(self) -> None:
        self._own: OrderedDict[str, tuple[list[Any], torch.device, PlacedShards]] = OrderedDict()
        self._of_ranks: OrderedDict[str, PlacedShards] = OrderedDict()
        self._shards: OrderedDict[tuple[str, ...], Shards] = OrderedDict()

    @torch.no_grad()
    def place(self, named: Named) -> ShardReport:
        """What this rank holds: told whole at first, by a seed where nothing has moved since, and
        None where no shard can be opened by another process."""
        whereabouts = _whereabouts(named)
        for known, device, kept in reversed(self._own.values()):
            if known == whereabouts:
                torch.cuda.synchronize(device)  # the optimizer's last step is in the weights
                if kept.placement.is_there(device):
                    return kept.placement.seed
        held = held_here(named)
        local: dict[int, torch.Tensor] = {}
        for index, (each, (_, tensor)) in enumerate(zip(held, named, strict=True)):
            if each is None or not isinstance(tensor, DTensor):
                continue
            shard = tensor.to_local()
            if not can_be_mapped(shard):
                held[index] = None
            elif each[0] < each[1]:
                local[index] = shard
        tensors = list(local.values())
        if not tensors or len({tensor.device for tensor in tensors}) != 1:
            return None
        torch.cuda.synchronize(tensors[0].device)
        try:
            placement = placement_of(tensors)
        except UnreachableMemoryError:
            return None
        if placement is None:
            return None
        spots = {index: number for number, index in enumerate(local)}
        placed = PlacedShards(place.here(), tuple(held), spots, placement)
        _keep(self._own, placement.seed, (whereabouts, tensors[0].device, placed), KEPT)
        return placed

    def forget(self) -> None:
        """After a failure: the leader may not have heard where the shards of this rank lie."""
        self._own.clear()

    def own(self, seed: str) -> PlacedShards | None:
        """What this rank told last of what has this seed."""
        return self._own[seed][2] if seed in self._own else None

    def assemble(self, of_ranks: Collection[ShardReport], named: Named) -> Shards | None:
        """On the leader: what can be read in place now, if all ranks hold it where they did."""
        if all(isinstance(each, str) for each in of_ranks):
            return self.survey(of_ranks, named)
        # they may move at each update: no more is made of them than must be
        self._remember(of_ranks)
        return None

    def survey(self, of_ranks: Collection[ShardReport], named: Named) -> Shards | None:
        """On the leader: what all ranks hold, which may have moved since the last update."""
        self._remember(of_ranks)
        seeds = tuple(
            each.placement.seed if isinstance(each, PlacedShards) else each or ""
            for each in of_ranks
        )
        if not all(seed in self._of_ranks for seed in seeds):
            return None
        if seeds not in self._shards:
            placed = [self._of_ranks[seed] for seed in seeds]
            if not all(place.is_reachable(each.host) for each in placed):
                return None
            shards = Shards(placed, [tensor.numel() for _, tensor in named])
            _keep(self._shards, seeds, shards, KEPT)
        return self._shards[seeds]

    def _remember(self, of_ranks: Collection[ShardReport]) -> None:
        for each in of_ranks:
            if isinstance(each, PlacedShards):
                _keep(self._of_ranks, each.placement.seed, each, KEPT * len(of_ranks))


def _whereabouts(named: Named) -> list[Any]:
    """All that decides what is read in place, and where: compared in whole at each update, since
    shards may be moved, swapped or cast between two. No tensor is kept."""
    found: list[Any] = []
    for name, tensor in named:
        found += name, tensor.dtype, tensor.shape
        if isinstance(tensor, DTensor):
            shard = tensor.to_local()
            kind = type(shard)
            address = shard.data_ptr() if kind in PLAIN else None  # others may have no memory
            found += tensor.device_mesh, tensor.placements, kind, address
            found += shard.dtype, shard.shape, shard.device, shard.is_contiguous()
    return found


def _keep(book: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    book[key] = value
    book.move_to_end(key)
    while len(book) > most:
        book.popitem(last=False)
