"""What changes in the chunks of one session, kept until all of it has come over the network."""

from collections.abc import Iterator
from threading import Lock
from typing import Any, NamedTuple

import torch

from sgl_fp8rl.protocol.snapshot import Change
from sgl_fp8rl.protocol.values import excerpt


class Changed(NamedTuple):
    """A chunk that changes."""

    chunk: int
    offset: int
    """Of the chunk in the bucket."""
    change: Change


class SessionChanges:
    """The changes that have come in one session, of ``most_bytes`` together."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._changes: dict[int, Changed] = {}
        self._taken = 0
        self._taking = Lock()
        """Several ranks of a trainer may send at once."""

    def room_for(self, index: Any, size: Any, of: int) -> torch.Tensor:
        """Memory for the ``size`` bytes of a change of a chunk of ``of`` bytes; ValueError if there
        can be no such change."""
        if type(index) is not int or index in self._changes or type(size) is not int:
            raise ValueError(
                f"chunk {excerpt(index)} cannot be changed; install the same sgl-fp8rl on both "
                f"sides"
            )
        if not 0 <= size <= of:
            raise ValueError(f"a change of {size} bytes is more than its chunk")
        with self._taking:
            self._taken += size
            if self._taken > self._most_bytes:
                raise ValueError(f"a change of {size} bytes is more than is kept of an update")
        return torch.empty(size, dtype=torch.uint8)

    def take(self, index: Any, payload: torch.Tensor, offset: int, of: int) -> None:
        """Note a change that has come whole, of the chunk of ``of`` bytes at ``offset``; ValueError
        if there is one of it."""
        with self._taking:
            if index in self._changes:
                raise ValueError(
                    f"chunk {excerpt(index)} comes twice; install the same sgl-fp8rl on both sides"
                )
            change = Change(payload, is_delta=payload.numel() != of)
            self._changes[index] = Changed(index, offset, change)

    def in_order(self) -> Iterator[Changed]:
        """Each chunk that changes, once; a trainer's neighbours lie in other slots."""
        for index in sorted(self._changes):
            yield self._changes.pop(index)
