"""Importance weights of the trainer's policy over the rollout's.

Truncation: Ionides 2008, doi:10.1198/106186008X320456. Masking by a band: IcePop, as in verl.
Shapes: B sequences, T tokens of the longest response.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from trainer_bridge.correction.config import CorrectionConfig, Level
from trainer_bridge.metrics.mismatch import Mismatch, Reducer, Values, bounded, ends, ones_where

SMALLEST_MEAN = 1e-8  # verl does not divide weights by less


def add_weights(
    reducer: Reducer, mismatch: Mismatch, level: Level, config: CorrectionConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weigh a block of rows and add its sums to ``reducer``.

    Returns:
        The weights, and 1.0 where the ratio is above C or outside the band; both float64 [B, T] and
        0 outside the mask.
    """
    ratio_BT, threshold = _ratio(mismatch, level), config.rollout_is_threshold
    if isinstance(threshold, tuple):
        outside_BT = (ratio_BT < threshold[0]) | (ratio_BT > threshold[1])
        weights_BT = ratio_BT.masked_fill(outside_BT, 0.0)
    else:
        outside_BT = ratio_BT > threshold
        weights_BT = ratio_BT.clamp(max=threshold)
    weights_BT *= mismatch.tokens_BT
    if config.rollout_is_batch_normalize:
        sums_B, lengths_B = weights_BT.sum(1), mismatch.lengths_B
        if level == "token":
            batch = sums_B.sum(), lengths_B.sum()
        else:  # all tokens of a sequence have one weight, and each sequence counts once
            batch = (sums_B / lengths_B.clamp(min=1)).sum(), mismatch.present_B.sum()
        reducer.sum("weight_batch", torch.stack(batch))
    reducer.sum("weight_square", weights_BT.square().sum())
    reducer.max("weight_ends", ends(weights_BT, mismatch.absent_BT))
    return weights_BT, ones_where(outside_BT & mismatch.mask_BT)


def batch_mean(reducer: Reducer, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The divisor of batch normalization, over the blocks of all ranks; every rank must call."""
    sums = reducer.total("weight_batch", group)
    mean: torch.Tensor = sums[0] / sums[1]
    return mean.where(mean > SMALLEST_MEAN, 1.0)


def read_weights(
    values: Values, metrics: dict[str, float], config: CorrectionConfig
) -> dict[str, float]:
    """Metrics of the weights before batch normalization, as in verl."""
    negative_lowest, highest = values["weight_ends"].tolist()
    mean_square = values["weight_square"].item() / metrics["tokens"]
    ess = metrics["weight_mean"] ** 2 / mean_square if mean_square else 0.0
    read = {"weight_min": -negative_lowest, "weight_max": highest, "weight_ess": ess}
    if config.rollout_is_batch_normalize:
        total, count = values["weight_batch"].tolist()
        read["weight_batch_mean"] = total / count if total / count > SMALLEST_MEAN else 1.0
    return read


def _ratio(mismatch: Mismatch, level: Level) -> torch.Tensor:
    if level == "token":
        return mismatch.ratio_BT
    log_ratio_B = _OF_SEQUENCES[level](mismatch)
    return bounded(log_ratio_B).exp()[:, None].expand_as(mismatch.mask_BT)


_OF_SEQUENCES: dict[Level, Callable[[Mismatch], torch.Tensor]] = {
    "sequence": lambda mismatch: mismatch.sequence_sum_B,
    "geometric": lambda mismatch: mismatch.sequence_mean_B,
}
"""Log ratio of a sequence, where all its tokens have one weight."""
