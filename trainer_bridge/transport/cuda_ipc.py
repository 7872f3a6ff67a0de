"""Device memory of a trainer that engines on its host read in place.

A rank on the trainer's own GPU reads at memory speed, one on another GPU over NVLink.
"""

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sgl_fp8rl.protocol.chunks import Piece
from sgl_fp8rl.protocol.cuda_memory import (
    CudaMemoryError,
    Handle,
    base_of,
    export,
    exportable,
    still_there,
)
from trainer_bridge.ranks.rank_values import exchanged
from trainer_bridge.transport.rank_client import UnreachableMemoryError


@exchanged
@dataclass(frozen=True)
class Placement:
    """Where parameters lie: allocations of this process, and an offset in bytes for each."""

    addresses: tuple[int, ...]
    bases: tuple[int, ...]
    handles: tuple[Handle, ...]
    spots: tuple[tuple[int, int], ...]
    """(index of the allocation, byte offset in it) of each parameter."""
    seed: str = field(default_factory=lambda: secrets.token_hex(16))
    """Tells this process's handles from another's."""

    def holds(self, tensors: list[torch.Tensor]) -> bool:
        """Whether these tensors lie in this very memory."""
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        return self.addresses == addresses and self.is_there(tensors[0].device)

    def is_there(self, device: torch.device) -> bool:
        """Whether this is still the memory that lies at these addresses.

        A handle is unique to its allocation, also where an address is given out again (CUDA driver
        API, cuIpcGetMemHandle).
        """
        return still_there(self.bases, self.handles, device.index)


def segments_message(
    seeds: Sequence[str], handles: Sequence[Handle], places: Mapping[str, Sequence[Piece]]
) -> dict[str, Any]:
    """What ranks need to read in place.

    Args:
        seeds: of the placements that the handles come from.
        places: the pieces of each HF tensor, whose segments are indices of ``handles``.
    """
    opened = [handle.to_json() for handle in handles]
    told = {
        name: [[piece.segment, piece.offset, *piece.rows] for piece in pieces]
        for name, pieces in places.items()
    }
    digest = hashlib.sha256(json.dumps([*seeds, opened, told]).encode()).hexdigest()
    return {"op": "segments", "name": digest, "handles": opened, "places": told}


def placement_of(tensors: list[torch.Tensor]) -> Placement | None:
    """Where these tensors lie, or None if another process cannot open it.

    Expandable segments and a memory saver's memory cannot be opened.

    Raises:
        UnreachableMemoryError: this system does not share any.
    """
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    segments: dict[int, int] = {}
    handles: list[Handle] = []
    spots: list[tuple[int, int]] = []
    base, stop = 0, 0
    try:
        for address in addresses:
            if not base <= address < stop:
                base, size = base_of(address)
                stop = base + size
            if base not in segments:
                if not exportable(base):
                    return None
                segments[base] = len(handles)
                handles.append(export(base))
            spots.append((segments[base], address - base))
    except CudaMemoryError as error:
        raise UnreachableMemoryError(str(error)) from error
    return Placement(addresses, tuple(segments), tuple(handles), tuple(spots))
