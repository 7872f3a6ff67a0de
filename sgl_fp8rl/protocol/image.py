"""What a trainer's last update was, kept on both sides of a slow link: only changed bytes travel.

A delta is exact, whatever the format of the weights is, and does not depend on what the engine's
ranks hold: they are given whole chunks. At the learning rates of RL some 0.1% to 0.3% of FP8 codes
change in a step, and each takes 3 bytes.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

RECORD_BYTES = 3
"""The distance from the record before, as uint16 (low byte first), and a byte's new value."""
MOST_DISTANCE = (1 << 16) - 1
WORTH = 0.5
"""No delta is made of more than this part of a chunk, nor where more of its words changed."""
WORD = torch.int64


class DeltaError(ValueError):
    """A delta that does not fit the chunk that it changes."""


class Change(NamedTuple):
    """What becomes of a chunk."""

    payload: torch.Tensor
    """uint8: a delta, or the whole chunk."""
    is_delta: bool


class Image:
    """The chunks of a committed update, each uint8.

    Args:
        name: of the update; both sides give it the same one.
    """

    def __init__(self, name: str, chunks: dict[int, torch.Tensor]) -> None:
        self.name = name
        self._chunks = chunks

    def change_to(self, chunk: int, content: torch.Tensor) -> Change:
        """What makes a chunk into ``content``, which is copied where it is needed whole."""
        old = self._chunks.get(chunk)
        delta = None if old is None or old.shape != content.shape else difference(old, content)
        return Change(content.clone(), False) if delta is None else Change(delta, True)

    def write(self, chunk: int, change: Change, target: torch.Tensor) -> None:
        """Write a chunk with a change into ``target``.

        Raises:
            DeltaError: the change does not fit this chunk.
        """
        old = self._chunks.get(chunk) if change.is_delta else change.payload
        if old is None or old.shape != target.shape:
            raise DeltaError(f"a change of chunk {chunk} does not fit; install one sgl-fp8rl")
        target.copy_(old)
        if change.is_delta:
            apply(target, change.payload)

    def advance(self, changes: Mapping[int, Change], name: str) -> "Image":
        """The image of the update with these changes, which holds the chunks that they name and no
        others: what somebody else sends meanwhile is not known. This one gives its chunks away and
        is empty: whoever still holds it is refused, also where the changes are interrupted."""
        old, self._chunks, self.name = self._chunks, {}, ""
        chunks = {}
        for chunk, change in changes.items():
            chunks[chunk] = old[chunk] if change.is_delta else change.payload
            if change.is_delta:
                apply(chunks[chunk], change.payload)
        return Image(name, chunks)


def difference(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
    """What ``apply`` makes ``new`` of ``old`` with, or None where it is too much.

    Args:
        old, new: uint8 ``[N]``.

    Returns:
        uint8 ``[3 * R]``: the distances of all R records, then their values.
    """
    size = new.numel()
    if not size:
        return new
    whole = size // WORD.itemsize * WORD.itemsize
    words = torch.nonzero(old[:whole].view(WORD) != new[:whole].view(WORD)).view(-1)
    if words.numel() > WORTH * size / WORD.itemsize:
        return None
    before, after = (each[:whole].view(-1, WORD.itemsize)[words] for each in (old, new))
    row, byte = torch.nonzero(before != after, as_tuple=True)
    rest = torch.nonzero(old[whole:] != new[whole:]).view(-1) + whole
    # with a record at regular distances, changed or not, no distance is too long
    regular = torch.arange(1, size // MOST_DISTANCE + 1) * MOST_DISTANCE - 1
    at = torch.unique(torch.cat([words[row] * WORD.itemsize + byte, rest, regular]))
    if at.numel() * RECORD_BYTES > WORTH * size:
        return None
    distances = torch.diff(at, prepend=torch.tensor([-1]))
    pairs = torch.stack([distances & 0xFF, distances >> 8], 1).to(torch.uint8)
    return torch.cat([pairs.view(-1), new[at]])


def apply(content: torch.Tensor, delta: torch.Tensor) -> None:
    """Write the values of a delta into ``content``.

    Args:
        content: uint8 ``[N]``.
        delta: as ``difference`` makes it.

    Raises:
        DeltaError: it is none of so many bytes; nothing was written.
    """
    records, rest = divmod(delta.numel(), RECORD_BYTES)
    pairs = delta[: 2 * records].view(records, 2).long()
    at = torch.cumsum(pairs[:, 0] + (pairs[:, 1] << 8), 0) - 1
    if rest or (records and not 0 <= int(at[0]) <= int(at[-1]) < content.numel()):
        raise DeltaError(f"a delta does not fit {content.numel()} bytes; install one sgl-fp8rl")
    content[at] = delta[2 * records :]
