"""Importance weights of the trainer's policy over the rollout's; and which tokens are too far off
to train on: rejection by divergence, and the veto.

Truncation: Ionides 2008, doi:10.1198/106186008X320456. Masking by a band: IcePop, as in verl.
Shapes: B sequences, T tokens of the longest response.
"""

import math
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


def keep_tokens(reducer: Reducer, mismatch: Mismatch, config: CorrectionConfig) -> torch.Tensor:
    """The tokens of a block of rows that pass all rejections and the veto, bool [B, T]; the counts
    go into ``reducer``."""
    kept_BT = mismatch.mask_BT
    divergences_BT: dict[str, torch.Tensor] = {}
    for option, bounds in config.rejection_bounds.items():
        reach, _, k = option.rpartition("_")
        if k not in divergences_BT:
            divergences_BT[k] = _DIVERGENCES[k](mismatch)
        statistic = _STATISTICS[reach](divergences_BT[k], mismatch)
        allowed = _allowed(statistic, *bounds)
        _count(reducer, option, mismatch, allowed)
        absent = mismatch.absent_BT if reach == "token" else mismatch.absent_B[:, None]
        reducer.sum(f"{option}/sum", statistic.sum())  # 0 outside the mask
        reducer.max(f"{option}/ends", ends(statistic, absent))
        kept_BT = kept_BT & allowed
    if config.veto_threshold is not None:
        # A log ratio is 0 outside the mask, and the threshold is at most 1.
        vetoed_BT = mismatch.log_ratio_BT < math.log(config.veto_threshold)
        allowed = ~vetoed_BT.any(1, keepdim=True)
        _count(reducer, "veto", mismatch, allowed)
        kept_BT = kept_BT & allowed
    _count(reducer, "all", mismatch, kept_BT)
    return kept_BT


def read_rejections(
    values: Values, metrics: dict[str, float], config: CorrectionConfig
) -> dict[str, float]:
    """masked_sequence_fraction, and for each rejection <option>/ masked_fraction (of tokens),
    masked_sequence_fraction (sequences with a masked token) and mean, min, max of its statistic.
    """
    read = {"masked_sequence_fraction": values["all"][1].item() / metrics["sequences"]}
    veto = [] if config.veto_threshold is None else ["veto"]
    for option in [*config.rollout_rs, *veto]:
        tokens, sequences = values[option].tolist()
        read[f"{option}/masked_fraction"] = tokens / metrics["tokens"]
        read[f"{option}/masked_sequence_fraction"] = sequences / metrics["sequences"]
    for option in config.rollout_rs:
        count = metrics["tokens" if option.startswith("token") else "sequences"]
        negative_lowest, highest = values[f"{option}/ends"].tolist()
        read[f"{option}/mean"] = values[f"{option}/sum"].item() / count
        read[f"{option}/min"], read[f"{option}/max"] = -negative_lowest, highest
    return read


def _mean(divergence_BT: torch.Tensor, mismatch: Mismatch) -> torch.Tensor:
    return divergence_BT.sum(1, keepdim=True) / mismatch.lengths_B[:, None].clamp(min=1)


def _maximum(divergence_BT: torch.Tensor, mismatch: Mismatch) -> torch.Tensor:
    if not divergence_BT.shape[1]:  # amax refuses 0 columns, sum does not
        return divergence_BT.sum(1, keepdim=True)
    # k2 and k3 are not negative, so the 0 outside the mask cannot raise the maximum.
    return divergence_BT.amax(1, keepdim=True)


_DIVERGENCES: dict[str, Callable[[Mismatch], torch.Tensor]] = {
    "k1": lambda mismatch: -mismatch.bounded_BT,
    "k2": lambda mismatch: mismatch.bounded_BT.square() / 2,
    "k3": lambda mismatch: mismatch.excess_BT - mismatch.bounded_BT,
}
"""Schulman's estimators of KL(rollout || trainer), of each token; 0 outside the mask."""
_STATISTICS: dict[str, Callable[[torch.Tensor, Mismatch], torch.Tensor]] = {
    "token": lambda divergence_BT, mismatch: divergence_BT,
    "seq_sum": lambda divergence_BT, mismatch: divergence_BT.sum(1, keepdim=True),
    "seq_mean": _mean,
    "seq_max": _maximum,
}
"""What is within bounds or not: [B, T] of a token, else [B, 1]."""


def _allowed(statistic: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Whether the statistic is within bounds; the lower one may be -inf."""
    allowed = statistic <= high
    return allowed if low == -math.inf else allowed & (statistic >= low)


def _count(reducer: Reducer, name: str, mismatch: Mismatch, allowed: torch.Tensor) -> None:
    """Count rejected tokens, and sequences with one. ``allowed`` is [B, T] or [B, 1]."""
    if allowed.shape == mismatch.mask_BT.shape:
        rejected_B = (mismatch.mask_BT & ~allowed).sum(1)
    else:
        rejected_B = mismatch.lengths_B.masked_fill(allowed[:, 0], 0.0)
    reducer.sum(name, torch.stack([rejected_B.sum(), (rejected_B > 0).sum()]))
