"""Tokens by the policy version that sampled them and by their position in the response.

Shapes: B sequences, T tokens of the longest response, V policy versions, P positions.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainer_bridge.metrics.histogram import BINS
from trainer_bridge.metrics.mismatch import ones_where
from trainer_bridge.metrics.tally import Tally
from trainer_bridge.rollout import PAD_VERSION

POSITIONS = (0, 16, 64, 256, 1024, 4096, 16384)
"""Where the groups of positions start, in tokens of the response."""
MOST_VERSIONS = 16
"""The newest that are reported; a token of an older one counts in the whole only."""


class RefusedElsewhereError(ValueError):
    """Another rank refused its inputs."""


def agree_on_versions(
    versions_BT: torch.Tensor | None,
    mask_BT: torch.Tensor | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> list[int]:
    """All ranks' policy versions, ascending, the newest MOST_VERSIONS of them.

    Args:
        mask_BT: None tells the other ranks that this one refused its inputs.
        device: where the collective runs.

    Raises:
        RefusedElsewhereError: a rank of the group called with ``mask_BT`` None.
    """
    mine: list[int] = []
    if versions_BT is not None and mask_BT is not None:
        shown_BT = versions_BT.where(mask_BT.to(versions_BT.device), PAD_VERSION)
        runs = torch.unique_consecutive(shown_BT).unique().tolist()
        mine = sorted(set(runs) - {PAD_VERSION})[-MOST_VERSIONS:]
    if group is None:
        return mine
    padding = [PAD_VERSION] * (MOST_VERSIONS - len(mine))
    note = torch.tensor([int(mask_BT is None), *mine, *padding], device=device)
    notes = [torch.empty_like(note) for _ in range(dist.get_world_size(group))]
    dist.all_gather(notes, note, group=group)
    told = torch.stack(notes).tolist()
    if refused := sum(faulty for faulty, *_ in told):
        raise RefusedElsewhereError(
            f"{refused} other ranks refused their inputs; read what they raised"
        )
    seen = {version for _, *versions in told for version in versions}
    return sorted(seen - {PAD_VERSION})[-MOST_VERSIONS:]


@dataclass(frozen=True)
class Groups:
    """The groups of a [B, T] batch: the whole, then positions, then versions where several."""

    versions: list[int]
    versions_BT: torch.Tensor | None
    widths: list[int]
    """Columns in each group of positions."""
    first_bin_T: torch.Tensor
    """Where the histogram of the column's group begins, float32."""

    @classmethod
    def of(
        cls, versions: list[int], versions_BT: torch.Tensor | None, mask_BT: torch.Tensor
    ) -> "Groups":
        """``versions`` is what ``agree_on_versions`` returned."""
        device = mask_BT.device
        columns = mask_BT.shape[1]
        ends = [min(end, columns) for end in (*POSITIONS[1:], columns)]
        widths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        starts_P = torch.tensor(POSITIONS, device=device)
        columns_T = torch.arange(columns, device=device)
        position_T = torch.bucketize(columns_T, starts_P, right=True) - 1
        if len(versions) < 2:
            versions, versions_BT = [], None
        elif versions_BT is not None:
            versions_BT = versions_BT.to(device)
        return cls(versions, versions_BT, widths, (position_T * BINS).float())

    @property
    def names(self) -> list[str]:
        """Prefixes of metrics, in the order of the groups."""
        positions = [f"position_{start}/" for start in POSITIONS]
        return ["", *positions, *(f"version_{version}/" for version in self.versions)]

    def add(
        self,
        tally: Tally,
        rows: slice,
        terms_BT: list[torch.Tensor],
        bins_BT: torch.Tensor,
        tokens_BT: torch.Tensor,
    ) -> None:
        """Count a block of rows: "tokens", the sums of its K terms [groups, K], and "histogram"
        [groups, BINS]. All terms are 0 where tokens_BT is 0, and tokens_BT is 1 elsewhere."""
        by_column_KT = torch.stack([term_BT.sum(0) for term_BT in terms_BT])
        sums = torch.stack([part.sum(1) for part in by_column_KT.split(self.widths, 1)])
        index_BT = (bins_BT + self.first_bin_T).long()
        counts = _histogram(index_BT, tokens_BT, len(POSITIONS) * BINS).view(-1, BINS)
        parts = [(sums.sum(0)[None], counts.sum(0)[None]), (sums, counts)]
        index_BT = bins_BT.long() if self.versions else index_BT
        for version in self.versions:
            if self.versions_BT is None:  # this rank, of several, does not know
                chosen_BT = torch.zeros_like(tokens_BT)
            else:
                chosen_BT = ones_where(self.versions_BT[rows] == version).mul_(tokens_BT)
            chosen = chosen_BT.flatten()
            sums = torch.stack([term_BT.flatten().dot(chosen) for term_BT in terms_BT])
            parts.append((sums[None], _histogram(index_BT, chosen_BT, BINS)[None]))
        for name, values in zip(("tokens", "histogram"), zip(*parts, strict=True), strict=True):
            tally.sum(name, torch.cat(values))


def _histogram(index_BT: torch.Tensor, weights_BT: torch.Tensor, bins: int) -> torch.Tensor:
    counts = weights_BT.new_zeros(bins)
    return counts.scatter_add_(0, index_BT.flatten(), weights_BT.flatten())
