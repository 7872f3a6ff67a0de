"""Deltas written where tensors are stored: each record goes to the addresses of its byte.

What is stored is neither read nor written but where it changes. An engine keeps the bytes that it
was sent, in boxes of its own parameters (BF16 as the upper half of FP32, too), so a table of boxes
is enough to find each byte; a byte of which nothing is stored has no box, one stored twice has two.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from sgl_fp8rl.ops.copy_descriptors import CopyDescriptor
from sgl_fp8rl.ops.delta_triton import RECORDS, Records, places
from sgl_fp8rl.ops.reference import LARGEST_SCALE
from sgl_fp8rl.ops.weight_quant_triton import Status, compiling

_NOT_FINITE = {
    torch.float8_e4m3fn: 0x7F,
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F800000,
}
"""The bits of the least magnitude of each dtype that is Inf or NaN."""
_NO_SCALE = int(np.float32(LARGEST_SCALE).view(np.int32)) + 1
"""Those of the least number that is too large for a scale."""
_COLUMNS = tl.constexpr(10)
"""Of the table of boxes; ``_scatter`` reads them in order."""
_WARPS = 8


class Scatter:
    """Where the bytes of a chunk are stored.

    Args:
        descriptors: copies of what is sent, in any order; of BF16 also into FP32.
        size: bytes of the chunk.
    """

    def __init__(
        self, descriptors: Iterable[CopyDescriptor], size: int, device: torch.device | str
    ) -> None:
        rows = sorted(map(_row, descriptors))
        table = np.array(rows, np.int64).reshape(-1, _COLUMNS.value)
        stops = table[:, 0] + (table[:, 1] - 1) * table[:, 2] + table[:, 3]
        self._size = size
        self._table = torch.from_numpy(table).to(device)
        self._starts = self._table[:, 0].contiguous()
        self._reaches = torch.from_numpy(np.maximum.accumulate(stops)).to(device)
        """Where each box ends, or one before it, if that is farther."""

    def locate(self, delta: torch.Tensor) -> "ScatteredDelta":
        """Look up where a delta on the device is to be written; nothing is yet. DeltaError if it is
        none of a chunk."""
        records = Records(delta, self._size)
        records.check()
        first = torch.searchsorted(self._reaches, records.starts, right=True)
        stop = torch.searchsorted(self._starts, records.ends - 1, right=True)
        return ScatteredDelta(self._table, records, first, stop)


class ScatteredDelta(NamedTuple):
    """A delta, and where its bytes are stored."""

    table: torch.Tensor
    records: Records
    first: torch.Tensor
    """Of each program, the first box that its bytes may lie in."""
    stop: torch.Tensor

    def run(self, status: Status, *, checks: bool) -> None:
        """Exchange the values of the delta for what is stored, on the current stream: it is the one
        that goes back from then on. Or, where it was written, look for NaN, Inf and scales that are
        not positive.

        Raises:
            RuntimeError: the kernel cannot be compiled here; nothing was written.
        """
        records = self.records
        if not records.count or not len(self.table):
            return
        with compiling(), torch.cuda.device_of(records.values):  # it starts on the current device
            _scatter[(records.programs,)](
                self.table,
                self.first,
                self.stop,
                records.distances,
                records.values,
                records.starts,
                records.count,
                status.words,
                checks,
                num_warps=_WARPS,
            )
        status.started += records.programs


def _row(box: CopyDescriptor) -> tuple[int, ...]:
    size, stored = box.source_dtype.itemsize, box.target_dtype.itemsize
    return (
        box.source,
        box.rows,
        size * (box.source_stride if box.rows > 1 else box.cols),
        size * box.cols,
        box.target,
        stored * box.target_stride,
        size,
        stored,
        _NO_SCALE | 1 << 32 | box.power_of_two << 33
        if box.positive
        else _NOT_FINITE[box.target_dtype],
        box.tag,
    )


@triton.jit(do_not_specialize=["records"], do_not_specialize_on_alignment=["values"])
def _scatter(
    table: tl.tensor,
    first: tl.tensor,
    stop: tl.tensor,
    distances: tl.tensor,
    values: tl.tensor,
    starts: tl.tensor,
    records: tl.int64,
    status: tl.tensor,
    CHECKS: tl.constexpr,
) -> None:
    """One program exchanges the bytes of ``RECORDS`` records, or checks the elements that have them
    (which is another launch: the bytes of one element may be those of two programs)."""
    record, inside, at = places(distances, starts, records)
    program = tl.program_id(0)
    value = tl.load(values + record, mask=inside, other=0)
    for number in range(tl.load(first + program), tl.load(stop + program)):
        box = table + number * _COLUMNS
        byte = at - tl.load(box)
        step = tl.load(box + 2)
        row = byte // step
        column = byte - row * step
        here = inside & (byte >= 0) & (row < tl.load(box + 1)) & (column < tl.load(box + 3))
        size = tl.load(box + 6)
        stored = tl.load(box + 7)
        element = tl.load(box + 4) + row * tl.load(box + 5) + column // size * stored
        if CHECKS:
            bits = tl.zeros((RECORDS,), tl.int64)
            for k in tl.static_range(4):
                part = (element + k).to(tl.pointer_type(tl.uint8))
                bits |= tl.load(part, mask=here & (k < stored), other=0).to(tl.int64) << (8 * k)
            magnitude = bits & ((1 << (8 * stored - 1)) - 1)
            limit = tl.load(box + 8)
            not_positive = (limit >> 32 != 0) & ((bits == 0) | (bits != magnitude))
            uneven = (limit >> 33 != 0) & (bits & 0x7FFFFF != 0)
            bad = here & ((magnitude >= (limit & 0xFFFFFFFF)) | not_positive | uneven)
            if tl.max(bad.to(tl.int32)) > 0:
                tl.atomic_min(status, tl.load(box + 9), sem="relaxed")
        else:
            # what is stored in a wider dtype is its upper bytes
            target = (element + stored - size + column % size).to(tl.pointer_type(tl.uint8))
            tl.store(values + record, tl.load(target, mask=here, other=0), mask=here)
            tl.store(target, value, mask=here)
    tl.atomic_add(status + 1, 1, sem="relaxed")
