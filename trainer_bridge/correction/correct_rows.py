"""The weights and the mask of a batch, computed in blocks of rows that bound the memory.

Shapes: B sequences, T tokens of the longest response.
"""

from dataclasses import dataclass

import torch

from trainer_bridge.correction import rejection, weights
from trainer_bridge.correction.config import CorrectionConfig
from trainer_bridge.metrics.batch_metrics import add_mismatch
from trainer_bridge.metrics.groups import Groups
from trainer_bridge.metrics.mismatch import Mismatch, ones_where, row_blocks
from trainer_bridge.metrics.reducer import Reducer


@dataclass(frozen=True)
class Corrected:
    """See ``correction.Correction``; weights before batch normalization."""

    weights_BT: torch.Tensor
    mask_BT: torch.Tensor
    old_logprobs_BT: torch.Tensor

    @classmethod
    def like(cls, mask_BT: torch.Tensor) -> "Corrected":
        """Uninitialized tensors of the same shape and device."""
        weights_BT, old_BT = (torch.empty_like(mask_BT, dtype=torch.float32) for _ in range(2))
        return cls(weights_BT, torch.empty_like(mask_BT), old_BT)


def correct_rows(
    reducer: Reducer,
    trainer_BT: torch.Tensor,
    rollout_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    groups: Groups,
    config: CorrectionConfig,
) -> Corrected:
    """Weigh and reject; the sums for the metrics go into ``reducer``."""
    found = Corrected.like(mask_BT)
    for rows in row_blocks(mask_BT):
        mismatch = Mismatch.of(trainer_BT[rows], rollout_BT[rows], mask_BT[rows])
        means_BT: list[torch.Tensor] = []  # in the order of config.means
        applied_BT, kept_BT = mismatch.tokens_BT, mismatch.mask_BT
        if config.rollout_is is not None:
            means_BT += weights.add_weights(reducer, mismatch, config.rollout_is, config)
            applied_BT = means_BT[0] if config.applies_weights else applied_BT
        if config.rejects:
            kept_BT = rejection.keep_tokens(reducer, mismatch, config)
            kept_ones_BT = ones_where(kept_BT)
            means_BT.append(mismatch.tokens_BT - kept_ones_BT)
            applied_BT = applied_BT * kept_ones_BT
        add_mismatch(reducer, rows, mismatch, groups, means_BT)
        found.mask_BT[rows], found.weights_BT[rows] = kept_BT, applied_BT
        old_BT = mismatch.rollout_BT if config.bypass_mode else mismatch.trainer_BT
        found.old_logprobs_BT[rows] = old_BT
    return found
