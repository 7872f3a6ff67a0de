"""Tokens by the policy version that sampled them and by their position in the response.

Of each group there is a histogram of log ratios, for percentiles without sorting. Its bins are
equally wide in sign(x) log(1 + |x| / 2^-20), 64 per factor of e. So a percentile has an error of
0.8% of its own log ratio (plus 2^-20), and the histograms of all blocks and ranks can be added.

Shapes: B sequences, T tokens of the longest response, V policy versions, P positions, K terms, N
bins.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from trainer_bridge.metrics.mismatch import LOG_RATIO_BOUND, Reducer, ones_where, row_blocks
from trainer_bridge.rollouts.batch import PAD_VERSION

POSITIONS = (0, 16, 64, 256, 1024, 4096, 16384)
"""Where the groups of positions start, in tokens of the response."""
MOST_VERSIONS = 16
"""Only the newest are reported; tokens of older ones count in the whole only."""
LINEAR = 2.0**-20  # bins grow from this |x| on
DENSITY = 64  # bins per factor of e: half a bin is 0.8% of |x| + LINEAR
MAGNITUDES = math.ceil(DENSITY * math.log1p(LOG_RATIO_BOUND / LINEAR))
BINS = 2 * MAGNITUDES + 1


def agree_on_versions(
    versions_BT: torch.Tensor | None,
    mask_BT: torch.Tensor | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> tuple[list[int], int]:
    """All ranks' policy versions, ascending, the newest MOST_VERSIONS of them; and how many ranks
    refused their inputs.

    Args:
        mask_BT: None informs the other ranks that this one refused its inputs.
        device: where the collective runs.
    """
    mine: list[int] = []
    if versions_BT is not None and mask_BT is not None:
        known_BT, seen = mask_BT.to(versions_BT.device), set[int]()
        for rows in row_blocks(known_BT):
            shown_BT = versions_BT[rows].where(known_BT[rows], PAD_VERSION)
            seen.update(torch.unique_consecutive(shown_BT).unique().tolist())
        mine = sorted(seen - {PAD_VERSION})[-MOST_VERSIONS:]
    if group is None:
        return mine, 0
    padding = [PAD_VERSION] * (MOST_VERSIONS - len(mine))
    note = torch.tensor([int(mask_BT is None), *mine, *padding], device=device)
    notes = [torch.empty_like(note) for _ in range(dist.get_world_size(group))]
    dist.all_gather(notes, note, group=group)
    received = torch.stack(notes).tolist()
    known = {version for _, *versions in received for version in versions}
    refused = sum(faulty for faulty, *_ in received)
    return sorted(known - {PAD_VERSION})[-MOST_VERSIONS:], refused


@dataclass(frozen=True)
class Groups:
    """The groups of a [B, T] batch: the whole, positions, and versions if there are several."""

    versions: list[int]
    versions_BT: torch.Tensor | None
    mask_BT: torch.Tensor

    @classmethod
    def of(
        cls, versions: list[int], versions_BT: torch.Tensor | None, mask_BT: torch.Tensor
    ) -> "Groups":
        """``versions`` is what ``agree_on_versions`` returned."""
        if len(versions) < 2:
            versions, versions_BT = [], None
        elif versions_BT is not None:
            versions_BT = versions_BT.to(mask_BT.device)
        return cls(versions, versions_BT, mask_BT)

    @cached_property
    def versions_V(self) -> torch.Tensor:
        """``versions`` on the device of the batch, int64."""
        return torch.tensor(self.versions, device=self.mask_BT.device, dtype=torch.int64)

    @cached_property
    def version_B(self) -> torch.Tensor | None:
        """The version of each row; None if a row has tokens of several."""
        if self.versions_BT is None or not self.versions_BT.numel():
            return None
        first_B1 = self.versions_BT[:, :1]
        rows_have_one = all(
            ((self.versions_BT[rows] == first_B1[rows]) | ~self.mask_BT[rows]).all()
            for rows in row_blocks(self.mask_BT)
        )
        return first_B1[:, 0] if rows_have_one else None

    @cached_property
    def widths(self) -> list[int]:
        """Number of columns of each group of positions."""
        columns = self.mask_BT.shape[1]
        ends = [min(end, columns) for end in (*POSITIONS[1:], columns)]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]

    @cached_property
    def first_bin_T(self) -> torch.Tensor:
        """First bin of the histogram of each column's group, float32."""
        starts_P = torch.tensor(POSITIONS, device=self.mask_BT.device)
        columns_T = torch.arange(self.mask_BT.shape[1], device=self.mask_BT.device)
        position_T = torch.bucketize(columns_T, starts_P, right=True) - 1
        return (position_T * BINS).float()

    @cached_property
    def first_bin_V(self) -> torch.Tensor:
        """First bin of each version's histogram, float64; the one before them takes versions that
        are not reported."""
        first_bins = [BINS * number for number in range(1, len(self.versions) + 1)]
        return torch.tensor(first_bins, device=self.mask_BT.device, dtype=torch.float64)

    @property
    def names(self) -> list[str]:
        """Prefixes of metrics, in the order of the groups."""
        positions = [f"position_{start}/" for start in POSITIONS]
        return ["", *positions, *(f"version_{version}/" for version in self.versions)]

    def add(
        self,
        reducer: Reducer,
        rows: slice,
        terms_BT: list[torch.Tensor],
        bins_BT: torch.Tensor,
        tokens_BT: torch.Tensor,
    ) -> None:
        """Add a block of rows: "tokens", the sums of its K terms [groups, K], and "histogram"
        [groups, BINS]. tokens_BT is 0 or 1, and all terms are 0 where it is 0."""
        count, shape, device = len(terms_BT), tuple(bins_BT.shape), bins_BT.device
        columns_KT = reducer.scratch("columns", (count, shape[1]), device)
        for term_BT, column_T in zip(terms_BT, columns_KT, strict=True):
            torch.sum(term_BT, 0, out=column_T)
        sums_PK = torch.stack([part.sum(1) for part in columns_KT.split(self.widths, 1)])
        counts_PN = _histograms(bins_BT + self.first_bin_T, tokens_BT, len(POSITIONS))
        sums, counts = [sums_PK.sum(0)[None], sums_PK], [counts_PN.sum(0)[None], counts_PN]
        if self.versions:
            sums_VK, first_bin = self._of_versions(reducer, rows, terms_BT)
            sums.append(sums_VK)
            counts.append(_histograms(bins_BT + first_bin, tokens_BT, len(self.versions) + 1)[1:])
        reducer.sum("tokens", torch.cat(sums))
        reducer.sum("histogram", torch.cat(counts))

    def _of_versions(
        self, reducer: Reducer, rows: slice, terms_BT: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums of K terms [V, K], and the first bin of the histogram of each token's version,
        [B, T] or [B, 1]."""
        if self.versions_BT is None:  # other ranks have versions, this one does not
            nothing = terms_BT[0].new_zeros(len(self.versions), len(terms_BT))
            return nothing, terms_BT[0].new_zeros(1)
        if self.version_B is not None:
            chosen_VB = ones_where(self.version_B[rows] == self.versions_V[:, None])
            sums_KB = torch.stack([term_BT.sum(1) for term_BT in terms_BT])
            return chosen_VB @ sums_KB.T, (self.first_bin_V @ chosen_VB)[:, None]
        versions_BT = self.versions_BT[rows]
        chosen_VBT = ones_where(versions_BT == self.versions_V[:, None, None])
        terms_KBT = reducer.scratch(
            "terms", (len(terms_BT), *versions_BT.shape), versions_BT.device
        )
        torch.stack(terms_BT, out=terms_KBT)
        sums_VK = chosen_VBT.flatten(1) @ terms_KBT.flatten(1).T
        return sums_VK, (self.first_bin_V @ chosen_VBT.flatten(1)).view_as(versions_BT)


def _histograms(index_BT: torch.Tensor, tokens_BT: torch.Tensor, number: int) -> torch.Tensor:
    """Tokens by index, float64 [number, BINS]."""
    counts = tokens_BT.new_zeros(number * BINS)
    index = index_BT.long().flatten()
    return counts.scatter_add_(0, index, tokens_BT.flatten()).view(number, BINS)


def bins_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """The bin of each log ratio within +-LOG_RATIO_BOUND, ascending with it: float32 integers plus
    a half, to be truncated to an index."""
    x = log_ratio.float().nan_to_num_()  # a NaN is refused later, and needs a bin until then
    magnitude = x.abs().mul_(1 / LINEAR).log1p_().mul_(DENSITY)
    return magnitude.copysign_(x).add_(MAGNITUDES + 0.5)


def percentiles(counts_CN: npt.NDArray[np.float64], percents: tuple[int, ...]) -> list[list[float]]:
    """The smallest log ratio with this percentage at or below it, for each histogram.

    Returns:
        By histogram and percentage, the middle of the value's bin.
    """
    below_CN = torch.from_numpy(counts_CN).cumsum(1).numpy()  # a quarter of NumPy's time
    needed_CK = np.ceil(below_CN[:, -1:] * np.array(percents) / 100).clip(1)
    found = (row.searchsorted(needed) for row, needed in zip(below_CN, needed_CK, strict=True))
    return [[_middle(index) for index in indices.tolist()] for indices in found]


def _middle(index: int) -> float:
    """The log ratio in the middle of a bin."""
    place = index - MAGNITUDES
    return math.copysign(LINEAR * math.expm1(abs(place) / DENSITY), place)
