"""Which tokens are too far off to train on: rejection by divergence, and the veto.

Shapes: B sequences, T tokens of the longest response.
"""

import math
from collections.abc import Callable

import torch

from trainer_bridge.correction.config import CorrectionConfig
from trainer_bridge.metrics.mismatch import Mismatch, Reducer, Values, ends


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
