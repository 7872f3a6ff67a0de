"""What engines read in the trainer's own memory: parameters that lie where they lay before."""

from typing import Any

import torch

from sgl_fp8rl.protocol.chunks import Piece
from trainer_bridge.shards.code_pieces import pieces_of_codes
from trainer_bridge.shards.placed_shards import Shards
from trainer_bridge.sources.parameters import Named
from trainer_bridge.transfer.layout import sources_for
from trainer_bridge.transfer.transfer_plan import TransferPlan
from trainer_bridge.transport.cuda_ipc import Placement, placement_of, segments_message


class InPlace:
    """The choice of what is read in place, for engines of one layout.

    The engine keeps that memory open until the next update, so memory that a trainer frees
    meanwhile must not be among it: only what has not moved since the last update is.
    """

    def __init__(self, layout: dict[str, Any]) -> None:
        self._layout = layout
        self._placement: Placement | None = None
        """Of whole parameters on this rank's GPU."""
        self._shards: Shards | None = None
        self._sharded: frozenset[int] = frozenset()
        """The parameters whose shards are read on the GPUs of all ranks."""
        self.coded: frozenset[int] = frozenset()
        """Those of them that are read as codes and scales, which the ranks made."""
        self._pieces: dict[str, list[Piece]] = {}
        """Where the HF tensors in them lie."""
        self._family: str | None = None
        self._told: tuple[Any, dict[str, Any]] | None = None
        """What ranks were told, and what that was made of."""

    def forget(self) -> None:
        """The engine lets go of everything."""
        self._placement = self._shards = self._told = None
        self._sharded, self.coded, self._pieces = frozenset(), frozenset(), {}

    def choose(
        self,
        named: Named,
        family: str | None,
        readable: list[bool],
        kv_scales: torch.Tensor | None,
        shards: Shards | None,
    ) -> list[bool]:
        """Which parameters are read in place.

        KV scales come last, keep their place in an update without them, and do not cause anything
        to be read in place.

        Args:
            readable: which are whole, on the GPU that is synchronised.
            kv_scales: the copy that stays at one address.
            shards: of all ranks, where none has moved since the last update.
        """
        self._choose_shards(named, family, shards)
        tensors = [
            tensor
            for (_, tensor), is_able in zip(named, readable, strict=True)
            if is_able and tensor is not kv_scales
        ]
        if kv_scales is not None and (
            kv_scales.device == tensors[0].device if tensors else self._sharded
        ):
            tensors = [*tensors, kv_scales]
        stays = self._placement is not None and self._placement.holds(tensors)
        if not stays:
            self._placement = placement_of(tensors) if tensors else None
        return [
            index in self._sharded or (is_able and stays) for index, is_able in enumerate(readable)
        ]

    @property
    def has_shards(self) -> bool:
        """Whether anything was chosen that lies on several ranks."""
        return bool(self._sharded)

    @property
    def seeds(self) -> tuple[str, ...]:
        """Of the shards that were chosen, and of their codes."""
        return () if self._shards is None else self._shards.seeds

    def message(self, plan: TransferPlan) -> dict[str, Any]:
        """What ranks need for this plan, which maps what was chosen."""
        made_of = self._placement, self._shards, plan
        if self._told is None or self._told[0] != made_of:
            shards, placement, places = self._shards, self._placement, dict(self._pieces)
            seeds = [] if shards is None else [*shards.seeds]
            handles = [] if shards is None else [*shards.handles]
            mapped = [index for index, is_mapped in enumerate(plan.mapped) if is_mapped]
            whole = [index for index in mapped if index not in self._sharded]
            spots = {index: number for number, index in enumerate(whole)}
            if whole:
                assert placement is not None
                for name, (index, start) in plan.offsets.items():
                    if name not in places:
                        segment, offset = placement.spots[spots[index]]
                        shape = plan.manifest.tensors[name].shape
                        rows = 0, shape[0] if shape else 1
                        places[name] = [Piece(len(handles) + segment, offset + start, rows)]
                seeds.append(placement.seed)
                handles += placement.handles
            self._told = made_of, segments_message(seeds, handles, places)
        return self._told[1]

    def _choose_shards(self, named: Named, family: str | None, shards: Shards | None) -> None:
        """Those that the engine can open."""
        layout = self._layout
        # without fp32: an engine of dummy weights, which does not know yet what it keeps in FP8
        if (
            shards is None
            or layout["fp32"] is None
            or not shards.gpus <= set(layout["visible_gpus"])
        ):
            self._shards, self._pieces = None, {}
            self._sharded = self.coded = frozenset()
            return
        if shards is self._shards and family == self._family:
            return
        self._family = family
        self._shards, self._pieces, found = shards, {}, []
        planned = sources_for(named, family, layout)
        coded = pieces_of_codes(shards, named, family, layout, planned)
        for index, source in enumerate(planned):
            pieces: dict[str, list[Piece] | None] = {**coded.get(index, {})} or {
                name: shards.pieces(index, view) for name, view in source.announce(source.dtype)
            }
            if all(pieces.values()):
                self._pieces |= {name: each for name, each in pieces.items() if each}
                found.append(index)
        self._sharded, self.coded = frozenset(found), frozenset(coded)
