"""All bounds of a ``CorrectionConfig`` as a row of numbers, which the kernels read."""

import math

from trainer_bridge.correction.config import REJECTIONS, CorrectionConfig

OPTIONS = len(REJECTIONS)
"""Rejections, in their order; bounds of those not asked for are infinite."""
LOWEST, HIGHEST = 0, OPTIONS
VETO = 2 * OPTIONS
"""The log of the veto's threshold."""
WEIGHT_LOWEST, WEIGHT_HIGHEST = VETO + 1, VETO + 2


def pack_bounds(config: CorrectionConfig) -> list[float]:
    """Where each stands is said above."""
    bounds = config.rejection_bounds
    pairs = [bounds.get(option, (-math.inf, math.inf)) for option in REJECTIONS]
    veto = -math.inf if config.veto_threshold is None else math.log(config.veto_threshold)
    threshold = config.rollout_is_threshold
    weights = threshold if isinstance(threshold, tuple) else (-math.inf, threshold)
    return [low for low, _ in pairs] + [high for _, high in pairs] + [veto, *weights]
