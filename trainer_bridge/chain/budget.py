"""The largest changes that fit into a number of bytes. What is left out stays in the difference to
what was published, so a later version brings it: error feedback.

The threshold is found by counting, without a sort, as MSTop-K does (Shi et al., "Towards Scalable
Distributed Training of Deep Learning on Public Cloud Clusters", MLSys 2021): here in one pass over
all changes, into bins of an eighth of an octave.

Shape suffixes: N, K rows and columns of a weight; n, k its blocks.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from sgl_fp8rl.formats import format_of, split_name, suffixes_of
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.ops.delta import RECORD_BYTES
from trainer_bridge.chain.files import Tensors

BINS_AN_OCTAVE, LOWEST_OCTAVE, BINS = 8, -160, 4096
"""From below FP32's least number to above its largest."""


class Changes(NamedTuple):
    """Of a weight, or of a tensor that is none."""

    bins: torch.Tensor
    """int64, of the weight's shape: by the size of each element's change, 0 where there is none. A
    block whose scale changes is one change, as large as that of its elements that changes most."""
    bytes: torch.Tensor
    """Of the same shape: what the change takes in a delta; of a block, at its first element."""
    is_block: torch.Tensor
    """Of the same shape: whether the element changes with its block."""


def within(before: Tensors, after: Tensors, budget_bytes: int) -> tuple[Tensors, bool]:
    """What to publish: ``after`` where the largest changes are, and ``before`` elsewhere.

    A block that is larger than the budget waits for a version that is whole.

    Args:
        before, after: with the same names, shapes and dtypes.

    Returns:
        the tensors, and whether they are ``after`` itself.
    """
    counts = torch.zeros(BINS, dtype=torch.float64)
    for name in _weights(after):
        bins, nbytes, _ = _changes(name, before, after, budget_bytes)
        counts += torch.bincount(bins.view(-1), nbytes.view(-1).double(), BINS)
    fits = counts[1:].flip(0).cumsum(0) <= budget_bytes
    border = BINS - 1 - int(fits.sum())
    if not border and not counts[0]:
        return after, True
    left = budget_bytes - float(counts[border + 1 :].sum())
    chosen: Tensors = {}
    for name in _weights(after):
        found = _changes(name, before, after, budget_bytes)
        format_ = format_of(after[name].dtype)
        taken, used = _taken(found, border, left, format_)
        left -= used
        chosen[name] = _mixed(before[name], after[name], taken)
        for suffix in _companions(name, after):
            mask = _blocks(taken.float(), format_).bool()
            chosen[name + suffix] = _mixed(before[name + suffix], after[name + suffix], mask)
    return chosen, False


def _taken(
    found: Changes, border: int, left: float, format_: WeightFormat
) -> tuple[torch.Tensor, float]:
    """Which elements are published: those above the border, and of those in it what fits; and the
    bytes of the latter. The first change in it fits, so something is published each time."""
    taken = found.bins > border
    if not border:
        return taken, 0.0
    at = (found.bins == border).view(-1)
    costs = torch.where(at, found.bytes.view(-1), 0)
    # a block's bytes are at its first element: its others go with it
    fits = at & (costs > 0) & (costs.cumsum(0) <= left)
    used = float(costs[fits].sum())
    fits = fits.view(taken.shape)
    if bool((found.is_block & fits).any()):
        whole = _spread(_blocks((fits & found.is_block).float(), format_), fits.shape, format_)
        fits = fits | (whole.bool() & found.is_block)
    return taken | fits, used


def _weights(tensors: Tensors) -> Iterator[str]:
    """The names of all but companions."""
    for name in tensors:
        owner, suffix = split_name(name)
        if not suffix or owner not in tensors:
            yield name


def _companions(name: str, tensors: Tensors) -> tuple[str, ...]:
    return tuple(s for s in suffixes_of(tensors[name].dtype) if name + s in tensors)


def _changes(name: str, before: Tensors, after: Tensors, most_bytes: int) -> Changes:
    """What changes of a weight.

    Args:
        most_bytes: of a block; a larger one is in bin 0.
    """
    old, new = before[name], after[name]
    nbytes = RECORD_BYTES * _bytes_that_differ(old, new)
    is_block = torch.zeros(new.shape, dtype=torch.bool)
    suffixes = _companions(name, after)
    if not suffixes:
        sizes = (new.float() - old.float()).abs()
        return Changes(torch.where(nbytes > 0, _bins(sizes), 0), nbytes, is_block)
    (suffix,), format_ = suffixes, format_of(new.dtype)
    sizes_NK = torch.zeros(new.shape)
    for tensors, sign in ((after, 1.0), (before, -1.0)):
        sizes_NK += sign * format_.decode({"": tensors[name], suffix: tensors[name + suffix]})
    sizes_NK = sizes_NK.abs()
    scale_bytes_nk = RECORD_BYTES * _bytes_that_differ(before[name + suffix], after[name + suffix])
    is_block = _spread(scale_bytes_nk > 0, new.shape, format_)
    bytes_nk = scale_bytes_nk + _sums(nbytes, format_)
    is_too_large = is_block & _spread(bytes_nk > most_bytes, new.shape, format_)
    sizes_NK = torch.where(
        is_block, _spread(_blocks(sizes_NK, format_), new.shape, format_), sizes_NK
    )
    bins = torch.where((nbytes > 0) | is_block, _bins(sizes_NK), 0)
    first = torch.zeros_like(nbytes)
    first[:: format_.block[0], :: format_.block[1]] = bytes_nk
    return Changes(
        torch.where(is_too_large, 0, bins), torch.where(is_block, first, nbytes), is_block
    )


def _bins(sizes: torch.Tensor) -> torch.Tensor:
    found = torch.floor(BINS_AN_OCTAVE * (sizes.double().log2() - LOWEST_OCTAVE))
    return torch.nan_to_num(found, neginf=1.0).clamp(1, BINS - 1).long()


def _sums(values_NK: torch.Tensor, format_: WeightFormat) -> torch.Tensor:
    """The sum of each block."""
    (height, width), (rows, columns) = format_.block, values_NK.shape
    padded = F.pad(values_NK, (0, -columns % width, 0, -rows % height))
    blocks = padded.view(-1, height, padded.shape[1] // width, width)
    return blocks.sum((1, 3))


def _bytes_that_differ(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Of each element, int64."""
    pair = [each.contiguous().view(-1, 1).view(torch.uint8) for each in (old, new)]
    return (pair[0] != pair[1]).sum(1).view(new.shape)


def _blocks(values_NK: torch.Tensor, format_: WeightFormat) -> torch.Tensor:
    """The largest value of each block."""
    found: torch.Tensor = F.max_pool2d(values_NK[None], format_.block, ceil_mode=True)[0]
    return found


def _spread(values_nk: torch.Tensor, shape: torch.Size, format_: WeightFormat) -> torch.Tensor:
    """Each block's value for all of its elements."""
    (height, width), (rows, columns) = format_.block, shape
    whole = values_nk.repeat_interleave(height, 0).repeat_interleave(width, 1)
    return whole[:rows, :columns]


def _mixed(old: torch.Tensor, new: torch.Tensor, is_new: torch.Tensor) -> torch.Tensor:
    if old.dtype.itemsize == 1:  # FP8 has no ``where``
        return torch.where(is_new, new.view(torch.uint8), old.view(torch.uint8)).view(new.dtype)
    return torch.where(is_new, new, old)
