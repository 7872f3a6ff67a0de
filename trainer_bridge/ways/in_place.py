"""The ways of what engines read where it lies: parameters, shards, and codes of shards.

Engines keep that memory open until the next update, so memory that a trainer frees meanwhile must
not be among it: only what has not moved since the last update is.
"""

from collections.abc import Collection, Sequence
from typing import Any

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


class InPlace:
    """A way of parameters that engines read where they lie."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """The engines let go of everything."""
        self.found: frozenset[int] = frozenset()
        """The parameters that go this way."""

    @property
    def memory(self) -> tuple[Sequence[str], Sequence[Handle]]:
        """Seeds of the placements, and the handles that come from them."""
        raise NotImplementedError

    def pieces(self, plan: TransferPlan) -> Pieces:
        """Where the HF tensors of this way lie."""
        raise NotImplementedError


class OfShards(InPlace):
    """Shards on the GPUs of all ranks of this host.

    Args:
        are_codes: whether as codes and scales that ranks have made of them, or as they are.
    """

    def __init__(self, layout: dict[str, Any], are_codes: bool) -> None:
        super().__init__()
        self._layout, self._are_codes = layout, are_codes

    def forget(self) -> None:
        super().forget()
        self._shards: Shards | None = None
        self._family: str | None = None
        self._pieces: Pieces = {}

    def choose(
        self, named: Named, family: str | None, shards: Shards | None, taken: Collection[int]
    ) -> frozenset[int]:
        """The parameters that can go this way now.

        Args:
            family: see ``sources.sources``.
            shards: of all ranks, where none has moved since the last update.
            taken: those that go another one.
        """
        layout = self._layout
        # without fp32: an engine of dummy weights, which does not know yet what it keeps in FP8
        if (
            shards is None
            or layout["fp32"] is None
            or not shards.gpus <= set(layout["visible_gpus"])
        ):
            self.forget()
        elif shards is not self._shards or family != self._family:
            self.forget()
            lying: dict[int, Pieces] = {}
            if self._are_codes:
                lying = pieces_of_codes(shards, named, family, layout)
            else:
                for index, source in enumerate(sources_for(named, family, layout)):
                    views = source.announce(source.dtype)
                    pieces = {name: shards.pieces(index, view) for name, view in views}
                    if index not in taken and all(pieces.values()):
                        lying[index] = {name: each for name, each in pieces.items() if each}
            self.found = frozenset(lying)
            self._pieces = {name: each for of in lying.values() for name, each in of.items()}
            self._shards, self._family = shards, family  # last: they say that the rest is theirs
        return self.found

    @property
    def memory(self) -> tuple[Sequence[str], Sequence[Handle]]:
        assert self._shards is not None
        held = self._shards
        if self._are_codes:
            assert held.codes is not None
            _, held = held.codes
        return held.seeds, held.handles

    def pieces(self, plan: TransferPlan) -> Pieces:
        return self._pieces


class Parameters(InPlace):
    """Whole parameters on this rank's GPU."""

    def forget(self) -> None:
        super().forget()
        self._placement: Placement | None = None

    def choose(
        self,
        named: Named,
        readable: list[bool],
        scales: torch.Tensor | None,
        is_shared: bool,
        taken: Collection[int],
    ) -> frozenset[int]:
        """The parameters that can go this way now.

        KV scales come last, keep their place in an update without them, and do not cause anything
        to be read in place.

        Args:
            readable: which are whole, on the GPU that is synchronised.
            scales: the copy of KV scales that stays at one address.
            is_shared: whether several engines are sent the same: what is whole is quantized once
                for all.
            taken: those that go another way.
        """
        able, tensors = [], []
        for index, (_, tensor) in enumerate(named):
            if readable[index] and (tensor is scales or not is_shared):
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
