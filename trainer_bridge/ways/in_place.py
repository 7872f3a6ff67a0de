"""The ways of what engines read where it lies: parameters, shards, and codes of shards.

Engines keep that memory open until the next update, so memory that a trainer frees meanwhile must
not be among it: only what has not moved since the last update is.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from sgl_fp8rl.protocol.chunks import Piece
from sgl_fp8rl.protocol.cuda_memory import Handle
from trainer_bridge.shards.code_pieces import pieces_of_codes
from trainer_bridge.shards.placed_shards import Shards
from trainer_bridge.sources.parameters import Named
from trainer_bridge.transfer.layout import sources_for
from trainer_bridge.transfer.transfer_plan import TransferPlan
from trainer_bridge.transport.cuda_ipc import Placement, placement_of

Pieces = dict[str, list[Piece]]
"""Where each HF tensor lies, by the handles of its way."""


class Case(NamedTuple):
    """What an update brings to engines of one layout."""

    named: Named
    family: str | None
    """See ``sources.sources``."""
    readable: list[bool]
    """Which are whole, on the GPU that is synchronised."""
    shards: Shards | None
    """Of all ranks, where none has moved since the last update."""
    kv_scales: torch.Tensor | None
    """The copy that stays at one address."""
    is_shared: bool
    """Whether several engines are sent the same: what is whole is quantized once for all."""


class InPlace:
    """A way of parameters that engines read where they lie."""

    def __init__(self, layout: dict[str, Any]) -> None:
        self._layout = layout
        self.forget()

    def forget(self) -> None:
        """The engines let go of everything."""
        self.found: frozenset[int] = frozenset()
        """The parameters that go this way."""

    def choose(self, case: Case, taken: Collection[int]) -> frozenset[int]:
        """The parameters that can go this way now.

        Args:
            taken: those that go another one.
        """
        raise NotImplementedError

    @property
    def memory(self) -> tuple[Sequence[str], Sequence[Handle]]:
        """Seeds of the placements, and the handles that come from them."""
        raise NotImplementedError

    def pieces(self, plan: TransferPlan) -> Pieces:
        """Where the HF tensors of this way lie."""
        raise NotImplementedError


class OfShards(InPlace):
    """A way of shards on the GPUs of all ranks of this host."""

    def forget(self) -> None:
        super().forget()
        self._shards: Shards | None = None
        self._family: str | None = None
        self._pieces: Pieces = {}

    def choose(self, case: Case, taken: Collection[int]) -> frozenset[int]:
        shards, layout = case.shards, self._layout
        # without fp32: an engine of dummy weights, which does not know yet what it keeps in FP8
        if (
            shards is None
            or layout["fp32"] is None
            or not shards.gpus <= set(layout["visible_gpus"])
        ):
            self.forget()
        elif shards is not self._shards or case.family != self._family:
            self.forget()
            self._shards, self._family = shards, case.family
            found = self._lying(shards, case, taken)
            self.found = frozenset(found)
            self._pieces = {name: each for of in found.values() for name, each in of.items()}
        return self.found

    def pieces(self, plan: TransferPlan) -> Pieces:
        return self._pieces

    def _lying(self, shards: Shards, case: Case, taken: Collection[int]) -> dict[int, Pieces]:
        """Where parameters lie, by their places."""
        raise NotImplementedError


class ShardCodes(OfShards):
    """Codes and scales that ranks have made of their shards."""

    @property
    def memory(self) -> tuple[Sequence[str], Sequence[Handle]]:
        assert self._shards is not None and self._shards.codes is not None
        _, codes = self._shards.codes
        return codes.seeds, codes.handles

    def _lying(self, shards: Shards, case: Case, taken: Collection[int]) -> dict[int, Pieces]:
        planned = sources_for(case.named, case.family, self._layout)
        return pieces_of_codes(shards, case.named, case.family, self._layout, planned)


class WholeShards(OfShards):
    """Shards as they are."""

    @property
    def memory(self) -> tuple[Sequence[str], Sequence[Handle]]:
        assert self._shards is not None
        return self._shards.seeds, self._shards.handles

    def _lying(self, shards: Shards, case: Case, taken: Collection[int]) -> dict[int, Pieces]:
        lying: dict[int, Pieces] = {}
        for index, source in enumerate(sources_for(case.named, case.family, self._layout)):
            pieces = {n: shards.pieces(index, view) for n, view in source.announce(source.dtype)}
            if index not in taken and all(pieces.values()):
                lying[index] = {name: each for name, each in pieces.items() if each}
        return lying


class Parameters(InPlace):
    """Whole parameters on this rank's GPU."""

    def forget(self) -> None:
        super().forget()
        self._placement: Placement | None = None

    def choose(self, case: Case, taken: Collection[int]) -> frozenset[int]:
        """KV scales come last, keep their place in an update without them, and do not cause
        anything to be read in place."""
        scales, able, tensors = case.kv_scales, [], []
        for index, (_, tensor) in enumerate(case.named):
            if case.readable[index] and (tensor is scales or not case.is_shared):
                able.append(index)
                if tensor is not scales:
                    tensors.append(tensor)
        if scales is not None and (scales.device == tensors[0].device if tensors else taken):
            tensors.append(scales)
        if self._placement is None or not self._placement.holds(tensors):
            self._placement, able = placement_of(tensors) if tensors else None, []
        self.found = frozenset(able)
        return self.found

    @property
    def memory(self) -> tuple[Sequence[str], Sequence[Handle]]:
        assert self._placement is not None
        return (self._placement.seed,), self._placement.handles

    def pieces(self, plan: TransferPlan) -> Pieces:
        assert self._placement is not None
        spots = dict(zip(sorted(self.found), self._placement.spots, strict=False))
        found: Pieces = {}
        for name, (index, start) in plan.offsets.items():
            if index in spots:
                segment, offset = spots[index]
                shape = plan.manifest.tensors[name].shape
                rows = 0, shape[0] if shape else 1
                found[name] = [Piece(segment, offset + start, rows)]
        return found
