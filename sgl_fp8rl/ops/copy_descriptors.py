"""Copies: where the boxes of a chunk go, as tables that the kernel walks.

Thousands of boxes become a few NumPy tables; nothing here knows of Triton or of a device.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_fp8rl.ops.reference import BLOCK

ACCESS = 16
"""Bytes that a thread reads or writes at once."""


class CopyDescriptor(NamedTuple):
    """One box of ``rows`` x ``cols`` elements, and where it goes.

    It is quantized where it has scales; a box is then whole blocks, but for the ragged end of its
    tensor. Anything else is cast, or copied as it is.
    """

    segment: int
    """Index into ``bases``: which piece of memory the source lies in."""
    source: int
    """Byte offset of the first element from that base, which is aligned to 16 bytes."""
    target: int
    """Byte address of the first element written."""
    scales: int
    """Byte address of the first scale; 0 where nothing is quantized."""
    rows: int
    cols: int
    source_stride: int
    """Elements from row to row."""
    target_stride: int
    scale_stride: int
    """Scales from block row to block row; 0 where nothing is quantized."""
    source_dtype: torch.dtype
    target_dtype: torch.dtype
    positive: bool
    """The values are scales: each must also be above zero."""
    tag: int
    """What ``Status`` reports where a value is NaN or Inf; not negative."""
    power_of_two: bool = False
    """The scales that are made, or copied, are powers of two."""


_NAMES = "first_tile", "tiles_across", *CopyDescriptor._fields[:9], "tag"
COLUMNS = np.dtype([(name, np.int64) for name in _NAMES])
"""A row of a table, in the order in which the kernel reads it."""

DescriptorTable = NDArray[np.void]
"""Copies, as records of ``COLUMNS``."""


@dataclass(frozen=True)
class CopyGroup:
    """Copies of one kind."""

    table: DescriptorTable
    tiles: NDArray[np.int64]
    """128x128 tiles of each copy, the ragged ones included."""
    source_dtype: torch.dtype
    target_dtype: torch.dtype
    positive: bool
    power_of_two: bool
    full: bool
    """All tiles are whole and aligned."""


def interleave(
    descriptors: Sequence[CopyDescriptor], gpus: Sequence[str], own: str
) -> list[CopyDescriptor]:
    """The same copies in an order that reads all GPUs at once, so that all are done together.

    In the order of names, engines that read the same shards would all read one GPU and then the
    next, each time over that GPU's links alone.

    Args:
        gpus: the GPU that each segment lies on.
        own: the GPU to begin with; engines on other GPUs begin with others.
    """
    numbers = {gpu: number for number, gpu in enumerate(sorted({*gpus, own}))}
    lies_on = np.array([numbers[gpus[each.segment]] for each in descriptors], np.int64)
    sizes = np.array([each.rows * each.cols for each in descriptors], np.int64)
    progress = np.zeros(len(sizes))
    for gpu in numbers.values():
        there = lies_on == gpu
        before = np.cumsum(sizes[there]) - sizes[there]
        progress[there] = before / max(int(sizes[there].sum()), 1)
    turn = (lies_on - numbers[own]) % len(numbers)
    return [descriptors[index] for index in np.lexsort((turn, progress))]


def group_descriptors(descriptors: Iterable[CopyDescriptor]) -> Iterator[CopyGroup]:
    """Sort copies by kind; one launch can carry out a group."""
    kinds: dict[tuple[torch.dtype, torch.dtype, bool, bool], list[CopyDescriptor]]
    kinds = defaultdict(list)
    for each in descriptors:
        kinds[each.source_dtype, each.target_dtype, each.positive, each.power_of_two].append(each)
    for (source, target, positive, power_of_two), kind in kinds.items():
        table = np.array([(0, 0, *descriptor[:9], descriptor.tag) for descriptor in kind], COLUMNS)
        sizes = source.itemsize, target.itemsize
        if not table["scales"].any():
            table = _flatten(table, *sizes)
        table = table[(table["rows"] > 0) & (table["cols"] > 0)]
        full = _is_full(table, *sizes)
        for subset, is_full in ((table[full], True), (table[~full], False)):
            if len(subset):
                across = -(-subset["cols"] // BLOCK)
                tiles = -(-subset["rows"] // BLOCK) * across
                subset["first_tile"] = np.cumsum(tiles) - tiles
                subset["tiles_across"] = across
                yield CopyGroup(subset, tiles, source, target, positive, power_of_two, is_full)


def _flatten(table: DescriptorTable, source_size: int, target_size: int) -> DescriptorTable:
    """Cut boxes that are contiguous on both sides into whole tiles, rows of 128 and a rest."""
    one = table["rows"] == 1
    flat = (one | (table["source_stride"] == table["cols"])) & (
        one | (table["target_stride"] == table["cols"])
    )
    rest = table[flat]
    size = rest["rows"] * rest["cols"]
    done = np.zeros_like(size)
    subsets = [table[~flat]]
    for unit in (BLOCK * BLOCK, BLOCK, 1):
        subset = rest.copy()
        count = (size - done) // unit * unit
        subset["source"] += done * source_size
        subset["target"] += done * target_size
        subset["rows"] = count // BLOCK if unit > 1 else 1
        subset["cols"] = BLOCK if unit > 1 else count
        subset["source_stride"] = subset["target_stride"] = BLOCK
        done += count
        subsets.append(subset)
    return np.concatenate(subsets)


def _is_full(table: DescriptorTable, source_size: int, target_size: int) -> NDArray[np.bool_]:
    """Which boxes are whole tiles that can be read and written 16 bytes at once."""
    ragged = table["rows"] % BLOCK | table["cols"] % BLOCK
    for side, size in (("source", source_size), ("target", target_size)):
        ragged |= table[side] % ACCESS | table[f"{side}_stride"] * size % ACCESS
    return np.asarray(ragged == 0)
