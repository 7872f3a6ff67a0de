"""What changed between two versions of some bytes, in plain torch: the reference for
``delta_triton.py``, and the implementation on a CPU.

A delta is exact, whatever the bytes are. It is a list of records, each of a byte that is another
one now; they lie in the order of the bytes, so equal inputs have equal deltas.
"""

import torch

RECORD_BYTES = 3
"""The distance from the record before, as uint16 (low byte first), and a byte's new value."""
MOST_DISTANCE = (1 << 16) - 1
"""There is a record at each multiple of it, whether its byte changed or not."""
WORTH = 0.5
"""No delta is made of more than this part of the bytes, nor where more of their words changed."""
WORD = torch.int64
AT_ONCE = 1 << 22
"""Records that are applied at once: it takes some 30 bytes for each."""


class DeltaError(ValueError):
    """A delta that does not fit the bytes that it changes."""


def difference(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
    """What ``apply`` makes ``new`` of ``old`` with, or None where it is too much.

    Args:
        old, new: uint8 ``[N]``, from an address that words may have.

    Returns:
        uint8 ``[3 * R]``: the distances of all R records, then their values.
    """
    size = new.numel()
    if not size:
        return new
    whole = size // WORD.itemsize * WORD.itemsize
    words = torch.nonzero(old[:whole].view(WORD) != new[:whole].view(WORD)).view(-1)
    if not is_worth(words.numel(), 0, size):
        return None
    before, after = (each[:whole].view(-1, WORD.itemsize)[words] for each in (old, new))
    row, byte = torch.nonzero(before != after, as_tuple=True)
    rest = torch.nonzero(old[whole:] != new[whole:]).view(-1) + whole
    # with a record at regular distances, changed or not, no distance is too long
    regular = torch.arange(1, size // MOST_DISTANCE + 1) * MOST_DISTANCE - 1
    at = torch.unique(torch.cat([words[row] * WORD.itemsize + byte, rest, regular]))
    if not is_worth(words.numel(), at.numel(), size):
        return None
    distances = torch.diff(at, prepend=torch.tensor([-1]))
    pairs = torch.stack([distances & 0xFF, distances >> 8], 1).to(torch.uint8)
    return torch.cat([pairs.view(-1), new[at]])


def is_worth(words: int, records: int, size: int) -> bool:
    """Whether a delta of ``size`` bytes is made, where so many whole words changed."""
    return words <= WORTH * size / WORD.itemsize and records * RECORD_BYTES <= WORTH * size


def apply(content: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Write the values of a delta into ``content``.

    Args:
        content: uint8 ``[N]``, on any device.
        delta: as ``difference`` makes it, on the same one.

    Returns:
        uint8 ``[R]``, the values that were there: ``undoing`` makes a delta of them.

    Raises:
        DeltaError: it is none of so many bytes; nothing was written.
    """
    size = content.numel()
    records = records_of(delta, size)
    pairs, values = delta[: 2 * records].view(records, 2), delta[2 * records :]
    sums = [some.sum(dtype=torch.int64) for some in (pairs[:, 0], pairs[:, 1])]
    zeros = (pairs[:, 0] | pairs[:, 1]).eq(0).sum()
    low, high, same = torch.stack([*sums, zeros]).tolist()
    check_distances(low + 256 * high, same, size)
    last = torch.full((1,), -1, device=content.device)
    replaced = []
    for some, new in zip(pairs.split(AT_ONCE), values.split(AT_ONCE), strict=True):
        distances = some[:, 0] + (some[:, 1].long() << 8)
        at = torch.cumsum(distances, 0).add_(last)
        replaced.append(content[at])
        content[at] = new
        last = at[-1:]
    return torch.cat(replaced) if replaced else values


def undoing(delta: torch.Tensor, replaced: torch.Tensor) -> torch.Tensor:
    """The delta that goes back; ``replaced`` is what ``apply`` returned."""
    return torch.cat([delta[: 2 * replaced.numel()], replaced])


def records_of(delta: torch.Tensor, size: int) -> int:
    """How many records a delta has; DeltaError if its last one is not whole."""
    records, rest = divmod(delta.numel(), RECORD_BYTES)
    if rest:
        raise DeltaError(_misfit(size))
    return records


def check_distances(total: int, zeros: int, size: int) -> None:
    """Raise DeltaError unless records lie inside of ``size`` bytes, each behind the one before."""
    if zeros or total > size:
        raise DeltaError(_misfit(size))


def _misfit(size: int) -> str:
    return f"a delta does not fit {size} bytes; install the same sgl-fp8rl on both sides"
