"""Deltas on the GPU, made in one pass over the bytes before and after; the bytes are those of
``delta.py``.

A program compares a block of units and writes down those that differ, in their order. When it is
known how many records each block has, what was written down becomes records: they take the time
of what changed, not of what was compared. Only numbers of records and the records go to the host.
"""

import torch
import triton
import triton.language as tl

from sgl_fp8rl.ops.copy_descriptors import ACCESS
from sgl_fp8rl.ops.delta import (
    MOST_DISTANCE,
    RECORD_BYTES,
    check_distances,
    is_worth,
    records_of,
)

_UNITS = tl.constexpr(1024)
"""Units of 16 bytes, which a thread reads at once, that a program compares. So many bytes have one
record at a regular distance, or none, and the record before lies at most ``_BACK`` blocks back."""
_BYTES = ACCESS * _UNITS.value
_BACK = 8
_CHANGES = tl.constexpr(128)
"""Units that a program makes into records at a time."""
WARPS = 4
RECORDS = tl.constexpr(2048)
"""That a program applies; their distances sum up to less than 2**31."""
assert MOST_DISTANCE // _BYTES + 1 <= _BACK and _BYTES < MOST_DISTANCE


class Comparison:
    """A ``delta.difference`` that the GPU makes on the current stream. Each step queues work.

    It takes memory of a quarter of the size of ``new`` until ``encode`` returns.

    Args:
        old, new: uint8 ``[N]``, at multiples of 16 bytes; not to be written before ``encode``.
    """

    def __init__(self, old: torch.Tensor, new: torch.Tensor) -> None:
        self._new, self._size = new, new.numel()
        self._blocks = blocks = triton.cdiv(self._size, _BYTES)
        self._changes = torch.empty(blocks * _UNITS.value, dtype=torch.int32, device=new.device)
        self._found = torch.empty((4, blocks), dtype=torch.int64, device=new.device)
        if blocks:
            with torch.cuda.device_of(new):  # a kernel starts on the current device
                _compare[(blocks,)](
                    old,
                    new,
                    self._changes,
                    self._found,
                    self._size,
                    blocks,
                    num_warps=WARPS,
                )
        self._totals = _HostCopy(self._found[:2].sum(1))
        self._delta: _HostCopy | None = None

    def encode(self) -> bool:
        """Queue the records, when it is known how many there are; False where it is too much."""
        words, records = self._totals.wait().tolist()
        if not is_worth(words, records, self._size):
            return False
        new = self._new
        delta = torch.empty(RECORD_BYTES * records, dtype=torch.uint8, device=new.device)
        if records:
            with torch.cuda.device_of(new):
                _encode[(self._blocks,)](
                    new,
                    self._changes,
                    self._found,
                    self._found[1].cumsum(0),
                    delta[: 2 * records].view(torch.int16),
                    delta[2 * records :],
                    self._blocks,
                    num_warps=WARPS,
                )
        self._delta = _HostCopy(delta)
        del self._changes, self._found
        return True

    def delta(self) -> torch.Tensor:
        """The delta, in host memory; after ``encode``."""
        assert self._delta is not None
        # in pinned memory, from which it goes back fast when the update commits
        return self._delta.wait()


class Records:
    """A delta on a GPU of ``size`` bytes, read on its current stream: ``RECORDS`` records for each
    program; DeltaError if its last record is not whole."""

    def __init__(self, delta: torch.Tensor, size: int) -> None:
        self.count = count = records_of(delta, size)
        """R."""
        self.programs = programs = triton.cdiv(count, RECORDS.value)
        self.distances = delta[: 2 * count].view(torch.int16)
        self.values = delta[2 * count :]
        self._size = size
        self._sums = sums = torch.empty((2, programs), dtype=torch.int64, device=delta.device)
        if count:
            with torch.cuda.device_of(delta):  # a kernel starts on the current device
                _sum[(programs,)](self.distances, sums, count, programs, num_warps=WARPS)
        self.ends = sums[0].cumsum(0)
        """int64 ``[programs]``, the byte behind the last record of each program."""
        self.starts = self.ends - sums[0]
        """The same of the program before: the first byte that a program may change."""

    def check(self) -> None:
        """Raise DeltaError unless records lie inside of what they change; synchronises."""
        if self.count:
            total, zeros = self._sums.sum(1).tolist()
            check_distances(total, zeros, self._size)


def apply(content: torch.Tensor, delta: torch.Tensor) -> None:
    """``delta.apply``, queued on the current stream. ``delta`` is the one that goes back from then
    on.

    Args:
        content: on one GPU.
        delta: on the same one; of a ``Comparison``, since it is not checked.
    """
    records = Records(delta, content.numel())
    if records.count:
        with torch.cuda.device_of(content):  # a kernel starts on the current device
            _apply[(records.programs,)](
                content,
                records.distances,
                records.values,
                records.starts,
                records.count,
                num_warps=WARPS,
            )


class _HostCopy:
    """A copy to the host that is queued on the current stream."""

    def __init__(self, source: torch.Tensor) -> None:
        on_gpu = source.is_cuda
        self._host = torch.empty_like(source, device="cpu", pin_memory=on_gpu)
        self._host.copy_(source, non_blocking=True)
        self._done = torch.cuda.current_stream(source.device).record_event() if on_gpu else None

    def wait(self) -> torch.Tensor:
        """What was copied."""
        if self._done is not None:
            self._done.synchronize()
        return self._host


_REGULAR = tl.constexpr(MOST_DISTANCE)
_LOOK_BACK = tl.constexpr(_BACK)
_UNIT = tl.constexpr(ACCESS)
# Each byte of a word: its lower bits, its lowest bit, and what moves bit 0 of byte j to 56 + j.
_LOWER = tl.constexpr(0x7F7F7F7F7F7F7F7F)
_LOWEST = tl.constexpr(0x0101010101010101)
_TO_TOP = tl.constexpr(0x0102040810204080)


@triton.jit
def _bits(mask: tl.tensor) -> tl.tensor:
    """How many of 16 bits are set."""
    twos = mask - ((mask >> 1) & 0x5555)
    fours = (twos & 0x3333) + ((twos >> 2) & 0x3333)
    eights = (fours + (fours >> 4)) & 0x0F0F
    return (eights + (eights >> 8)) & 0x1F


@triton.jit
def _last_byte(change: tl.tensor) -> tl.tensor:
    """The place in its block of the last byte of a unit that has a record."""
    highest = change * 0
    for j in tl.static_range(1, _UNIT):
        highest = tl.where((change >> j) & 1 == 1, j, highest)
    return (change >> 16) * _UNIT + highest


# A chunk may have any size: one that is a multiple of 16 compiles nothing anew.
@triton.jit(do_not_specialize=["size", "blocks"])
def _compare(
    old: tl.tensor,
    new: tl.tensor,
    changes: tl.tensor,
    found: tl.tensor,
    size: tl.int64,
    blocks: tl.int64,
) -> None:
    """One program compares ``_UNITS`` units. It writes the number of each that has a record and, in
    the lower 16 bits, of which of its bytes; and of the block: words that changed, records, units
    that have any, and the last byte that has one, or -1."""
    block = tl.program_id(0).to(tl.int64)
    first = block * (_UNITS * _UNIT)
    unit = tl.arange(0, _UNITS)
    word = 2 * unit[:, None] + tl.arange(0, 2)[None, :]
    before = (old + first).to(tl.pointer_type(tl.int64))
    after = (new + first).to(tl.pointer_type(tl.int64))
    if first + _UNITS * _UNIT <= size:
        differ = tl.load(before + word) ^ tl.load(after + word)
        changed = tl.sum((differ != 0).to(tl.int32))
    else:
        whole = ((size - first) // 8).to(tl.int32)
        inside = word < whole
        differ = tl.load(before + word, mask=inside, other=0)
        differ ^= tl.load(after + word, mask=inside, other=0)
        changed = tl.sum((differ != 0).to(tl.int32))
        for j in tl.static_range(7):  # bytes behind the last whole word
            at = first + whole * 8 + j
            rest = tl.load(old + at, mask=at < size, other=0)
            rest ^= tl.load(new + at, mask=at < size, other=0)
            differ |= tl.where(word == whole, rest.to(tl.int64) << (8 * j), 0)
    lowest = ((((differ & _LOWER) + _LOWER) | differ) >> 7) & _LOWEST
    low, high = tl.split(((lowest * _TO_TOP) >> 56).to(tl.int32) & 0xFF)
    mask = low | (high << 8)
    regular = tl.minimum(first + _UNITS * _UNIT, size) // _REGULAR * _REGULAR - 1 - first
    if regular >= 0:
        at = regular.to(tl.int32)
        mask |= tl.where(unit == at // _UNIT, 1 << (at % _UNIT), 0)
    has_record = mask != 0
    change = (unit << 16) | mask
    place = tl.cumsum(has_record.to(tl.int32), 0) - 1
    tl.store(changes + block * _UNITS + place, change, mask=has_record)
    last = tl.max(tl.where(has_record, change, -1))
    tl.store(found + block, changed.to(tl.int64))
    tl.store(found + blocks + block, tl.sum(_bits(mask)).to(tl.int64))
    tl.store(found + 2 * blocks + block, tl.sum(has_record.to(tl.int32)).to(tl.int64))
    tl.store(found + 3 * blocks + block, tl.where(last < 0, -1, first + _last_byte(last)))


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["values"])
def _encode(
    new: tl.tensor,
    changes: tl.tensor,
    found: tl.tensor,
    ends: tl.tensor,
    distances: tl.tensor,
    values: tl.tensor,
    blocks: tl.int64,
) -> None:
    """One program writes the records of a block.

    Args:
        ends: of each block, how many records it and those before it have.
    """
    block = tl.program_id(0).to(tl.int64)
    first = block * (_UNITS * _UNIT)
    count = tl.load(found + 2 * blocks + block).to(tl.int32)
    record = tl.load(ends + block) - tl.load(found + blocks + block)
    back = block - 1 - tl.arange(0, _LOOK_BACK)
    last = tl.max(tl.load(found + 3 * blocks + back, mask=back >= 0, other=-1))
    for start in range(0, count, _CHANGES):
        number = start + tl.arange(0, _CHANGES)
        inside = number < count
        mine = changes + block * _UNITS + number
        change = tl.load(mine, mask=inside, other=0)
        before = tl.load(mine - 1, mask=inside & (number > 0), other=0)
        previous = tl.where(number > 0, first + _last_byte(before), last)
        records = _bits(change & 0xFFFF)
        place = record + tl.cumsum(records, 0) - records
        record += tl.sum(records)
        at = first + (change >> 16) * _UNIT
        for j in tl.static_range(_UNIT):
            is_here = (change >> j) & 1 == 1
            tl.store(distances + place, (at + j - previous).to(tl.int16), mask=is_here)
            value = tl.load(new + at + j, mask=is_here, other=0)
            tl.store(values + place, value, mask=is_here)
            previous = tl.where(is_here, at + j, previous)
            place += is_here.to(tl.int64)


@triton.jit
def _distances_of(distances: tl.tensor, records: tl.int64) -> tl.tuple:
    """This program, the numbers of its records, which of them there are, and their distances."""
    program = tl.program_id(0).to(tl.int64)
    record = program * RECORDS + tl.arange(0, RECORDS)
    inside = record < records
    distance = tl.load(distances + record, mask=inside, other=0).to(tl.int32) & 0xFFFF
    return program, record, inside, distance


@triton.jit(do_not_specialize=["records", "programs"])
def _sum(
    distances: tl.tensor,
    sums: tl.tensor,
    records: tl.int64,
    programs: tl.int64,
) -> None:
    """One program sums up the distances of ``RECORDS`` records, and counts those that are 0."""
    program, _, inside, distance = _distances_of(distances, records)
    tl.store(sums + program, tl.sum(distance).to(tl.int64))
    zeros = tl.sum((inside & (distance == 0)).to(tl.int32))
    tl.store(sums + programs + program, zeros.to(tl.int64))


@triton.jit
def places(distances: tl.tensor, starts: tl.tensor, records: tl.int64) -> tl.tuple:
    """The records of this program: their numbers, which of them there are, and their bytes."""
    program, record, inside, distance = _distances_of(distances, records)
    return record, inside, tl.load(starts + program) - 1 + tl.cumsum(distance, 0).to(tl.int64)


@triton.jit(do_not_specialize=["records"], do_not_specialize_on_alignment=["values"])
def _apply(
    content: tl.tensor,
    distances: tl.tensor,
    values: tl.tensor,
    starts: tl.tensor,
    records: tl.int64,
) -> None:
    """One program exchanges the bytes of ``RECORDS`` records."""
    record, inside, at = places(distances, starts, records)
    value = tl.load(values + record, mask=inside, other=0)
    tl.store(values + record, tl.load(content + at, mask=inside, other=0), mask=inside)
    tl.store(content + at, value, mask=inside)
