"""What a delta is, byte by byte; shares no code with ``sgl_fp8rl/ops/delta.py``."""

import struct

MOST = 65535
"""Bytes from record to record."""


def delta_of(old: bytes, new: bytes) -> bytes | None:
    """The delta, or None where so much changed that none is made."""
    size = len(new)
    whole = [slice(at, at + 8) for at in range(0, size - 7, 8)]
    if 2 * sum(old[word] != new[word] for word in whole) > size / 8:
        return None
    regular = range(MOST - 1, size, MOST)
    records = sorted({*regular, *(at for at in range(size) if old[at] != new[at])})
    if 2 * 3 * len(records) > size:
        return None
    last, distances, values = -1, b"", bytes(new[at] for at in records)
    for at in records:
        distances += struct.pack("<H", at - last)
        last = at
    return distances + values


def read(content: bytes, delta: bytes) -> bytes:
    """What a delta makes of some bytes.

    Raises:
        IndexError: a record lies behind them.
    """
    records, at, changed = len(delta) // 3, -1, bytearray(content)
    for record in range(records):
        at += int.from_bytes(delta[2 * record : 2 * record + 2], "little")
        changed[at] = delta[2 * records + record]
    return bytes(changed)
