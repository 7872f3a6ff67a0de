"""The mismatch of a batch: trainer minus rollout logprob of the same tokens, derived terms, and
their sums over blocks and ranks.

Weights, rejections and metrics all read these terms, so that each is computed once. Everything is
float64: a sequence of 32k tokens sums 32k log ratios, and chi2 and k3 are differences of numbers
that nearly cancel.

Shapes: B sequences, T tokens of the longest response.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from trainer_bridge.ranks.group import device_of

LOG_RATIO_BOUND = 20.0
"""Log ratios are clamped to +-20 before exp, as in verl: e^40 and its sums stay finite."""

# Tokens per block: on a CPU as many as fit its caches, on a GPU its memory.
CPU_TOKENS, GPU_TOKENS = 1 << 16, 1 << 22

NEVER_LARGEST = 1e300
"""Replaces infinity, since infinity * 0 is NaN."""

Values = dict[str, npt.NDArray[np.float64]]
"""Numbers by name, on the host: NumPy slices them in a fraction of torch's time."""


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """The log ratio clamped to +-LOG_RATIO_BOUND."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def ones_where(condition: torch.Tensor) -> torch.Tensor:
    """1.0 where True, else 0.0, float64; through uint8, whose conversion is vectorized."""
    return condition.view(torch.uint8).double()


def row_blocks(mask_BT: torch.Tensor) -> Iterator[slice]:
    """The rows of a batch in blocks, at least one."""
    count, width = mask_BT.shape
    rows = max(1, (GPU_TOKENS if mask_BT.is_cuda else CPU_TOKENS) // max(width, 1))
    for start in range(0, max(count, 1), rows):
        yield slice(start, min(start + rows, count))


@dataclass(frozen=True)
class Mismatch:
    """Log ratios of the tokens that count, without gradient."""

    trainer_BT: torch.Tensor
    """Trainer logprob, float64 [B, T], 0 outside the mask."""
    rollout_BT: torch.Tensor
    """Rollout logprob, float64 [B, T], 0 outside the mask."""
    mask_BT: torch.Tensor
    """Bool [B, T]."""

    @classmethod
    def of(
        cls, trainer_BT: torch.Tensor, rollout_BT: torch.Tensor, mask_BT: torch.Tensor
    ) -> "Mismatch":
        """From logprobs of any float dtype; values outside the mask do not matter."""
        trainer_BT, rollout_BT = (
            logprobs_BT.detach().where(mask_BT, 0.0).double()
            for logprobs_BT in (trainer_BT, rollout_BT)
        )
        return cls(trainer_BT, rollout_BT, mask_BT)

    @cached_property
    def log_ratio_BT(self) -> torch.Tensor:
        """log(pi_trainer / pi_rollout) of each token; 0 outside the mask."""
        return self.trainer_BT - self.rollout_BT

    @cached_property
    def bounded_BT(self) -> torch.Tensor:
        """The log ratio, clamped to +-LOG_RATIO_BOUND."""
        return bounded(self.log_ratio_BT)

    @cached_property
    def excess_BT(self) -> torch.Tensor:
        """Ratio minus 1, exact where the ratio is near 1; 0 outside the mask."""
        return self.bounded_BT.expm1()

    @cached_property
    def ratio_BT(self) -> torch.Tensor:
        """pi_trainer / pi_rollout, exact where it is small; 1 outside the mask."""
        return self.bounded_BT.exp()

    @cached_property
    def tokens_BT(self) -> torch.Tensor:
        """1.0 where the mask is True, else 0.0."""
        return ones_where(self.mask_BT)

    @cached_property
    def lengths_B(self) -> torch.Tensor:
        """Tokens that count in each sequence, float64."""
        return self.tokens_BT.sum(1)

    @cached_property
    def present_B(self) -> torch.Tensor:
        """1.0 for a sequence that has a token, else 0.0."""
        return self.lengths_B.clamp(max=1)

    @cached_property
    def absent_BT(self) -> torch.Tensor:
        """For ``ends``: excludes values outside the mask."""
        return (self.tokens_BT - 1).mul_(NEVER_LARGEST)

    @cached_property
    def absent_B(self) -> torch.Tensor:
        """For ``ends``: excludes sequences without a token."""
        return (self.present_B - 1) * NEVER_LARGEST

    @property
    def most(self) -> torch.Tensor:
        """The largest trainer and rollout logprob, float64 [2]; at least 0 if not all count."""
        if not self.mask_BT.numel():  # amax refuses it
            return self.trainer_BT.new_zeros(2)
        return torch.stack([self.trainer_BT.amax(), self.rollout_BT.amax()])

    @cached_property
    def sequence_sum_B(self) -> torch.Tensor:
        """Log ratio of the whole sequence: the sum over its tokens, not clamped."""
        return self.log_ratio_BT.sum(1)

    @cached_property
    def sequence_mean_B(self) -> torch.Tensor:
        """Log of the geometric mean of the sequence's token ratios; 0 without a token."""
        return self.sequence_sum_B / self.lengths_B.clamp(min=1)


def ends(values: torch.Tensor, absent: torch.Tensor) -> torch.Tensor:
    """Maximum of -values and of values, without ``absent`` ones, float64 [2].

    Blocks and ranks combine by maximum; without any value both are below -1e299.
    """
    if not values.numel():
        return values.new_full((2,), -NEVER_LARGEST)
    return torch.stack([(absent - values).amax(), (absent + values).amax()])


class Reducer:
    """Named float64 tensors, reduced by sum or by maximum: collected first, then read at once.

    That takes one device sync and two collectives, however many numbers there are.
    """

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._maxima: dict[str, torch.Tensor] = {}
        self._scratch: dict[str, torch.Tensor] = {}

    def scratch(self, name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Float64 memory for one block, reused by the next block: fresh memory costs a page fault
        per 4 KiB."""
        if name not in self._scratch or self._scratch[name].shape != shape:
            self._scratch[name] = torch.empty(shape, dtype=torch.float64, device=device)
        return self._scratch[name]

    def sum(self, name: str, value: torch.Tensor) -> None:
        """Add ``value``, of any shape (the same on all ranks)."""
        value = value.double()
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def max(self, name: str, value: torch.Tensor) -> None:
        """Keep the largest ``value``, of any shape (the same on all ranks)."""
        value = value.double()
        known = self._maxima.get(name)
        self._maxima[name] = value if known is None else torch.maximum(known, value)

    def total(self, name: str, group: dist.ProcessGroup | None) -> torch.Tensor:
        """One sum so far, over the ranks of ``group``, on its device."""
        own = self._sums[name]
        if group is None:
            return own
        total = own.to(device_of(group, own.device), copy=True)
        dist.all_reduce(total, dist.ReduceOp.SUM, group)
        return total.to(own.device)

    def reduce(self, group: dist.ProcessGroup | None) -> Values:
        """All values over the ranks of ``group`` (None: this process)."""
        # sorted: a rank that used kernels added its names in another order
        named = dict(sorted(self._sums.items())) | dict(sorted(self._maxima.items()))
        together = torch.cat([value.reshape(-1) for value in named.values()])
        if group is not None:
            together = together.to(device_of(group, together.device))
            added = sum(value.numel() for value in self._sums.values())
            dist.all_reduce(together[:added], dist.ReduceOp.SUM, group)
            dist.all_reduce(together[added:], dist.ReduceOp.MAX, group)
        numbers, begin, values = together.cpu().numpy(), 0, {}
        for name, value in named.items():
            end = begin + value.numel()
            values[name] = numbers[begin:end].reshape(value.shape)
            begin = end
        return values
