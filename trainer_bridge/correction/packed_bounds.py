"""All bounds of a ``CorrectionConfig`` as one row of numbers, for the kernels."""

import math

from trainer_bridge.correction.config import REJECTIONS, CorrectionConfig

OPTIONS = len(REJECTIONS)
"""Rejections in the order of REJECTIONS; those not in use have infinite bounds."""
LOWEST, HIGHEST = 0, OPTIONS
VETO = 2 * OPTIONS
"""The log of the veto threshold."""
WEIGHT_LOWEST, WEIGHT_HIGHEST = VETO + 1, VETO + 2


def pack_bounds(config: CorrectionConfig) -> list[float]:
    """The row, with each bound at its index above."""
    bounds = config.rejection_bounds
    pairs = [bounds.get(option, (-math.inf, math.inf)) for option in REJECTIONS]
    veto = -math.inf if config.veto_threshold is None else math.log(config.veto_threshold)
    threshold = config.rollout_is_threshold
    weights = threshold if isinstance(threshold, tuple) else (-math.inf, threshold)
    return [low for low, _ in pairs] + [high for _, high in pairs] + [veto, *weights]
