"""All bounds of a ``CorrectionConfig`` as a row of numbers, which the kernels read."""

import math

from trainer_bridge.correction.config import CorrectionConfig

REACHES = ("token", "seq_sum", "seq_mean", "seq_max")
OPTIONS = 3 * len(REACHES)
"""Rejections: of each reach k1, k2, k3. Bounds of those not asked for are infinite."""
LOWEST, HIGHEST = 0, OPTIONS
VETO = 2 * OPTIONS
"""The log of the veto's threshold."""
WEIGHT_LOWEST, WEIGHT_HIGHEST = VETO + 1, VETO + 2


def limits_of(config: CorrectionConfig) -> list[float]:
    """Where each stands is said above."""
    bounds = [(-math.inf, math.inf)] * OPTIONS
    for option, threshold in config.rollout_rs.items():
        if isinstance(threshold, tuple):
            low, high = map(math.log, threshold)
        elif option.endswith("k1"):
            low, high = math.log(1 / threshold), math.log(threshold)
        else:
            low, high = -math.inf, threshold
        bounds[number_of(option)] = low, high
    veto = -math.inf if config.veto_threshold is None else math.log(config.veto_threshold)
    threshold = config.rollout_is_threshold
    weights = threshold if isinstance(threshold, tuple) else (-math.inf, threshold)
    return [low for low, _ in bounds] + [high for _, high in bounds] + [veto, *weights]


def number_of(option: str) -> int:
    """Of a rejection, from 0."""
    reach, _, k = option.rpartition("_k")
    return 3 * REACHES.index(reach) + int(k) - 1
