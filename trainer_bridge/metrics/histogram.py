"""Percentiles of log ratios without sorting: a histogram with logarithmic bins.

Bins are equally wide in sign(x) log(1 + |x| / 2^-20), 64 per factor of e. So a percentile has an
error of 0.8% of its own log ratio (plus 2^-20), and the histograms of all blocks and ranks can be
added.
"""

import math

import numpy as np
import numpy.typing as npt
import torch

from trainer_bridge.metrics.mismatch import LOG_RATIO_BOUND

LINEAR = 2.0**-20  # bins grow from this |x| on
DENSITY = 64  # bins per factor of e
RELATIVE_ERROR = math.expm1(1 / (2 * DENSITY))  # of |x| + LINEAR: half a bin, 0.8%

MAGNITUDES = math.ceil(DENSITY * math.log1p(LOG_RATIO_BOUND / LINEAR))
BINS = 2 * MAGNITUDES + 1


def bins_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """The bin of each log ratio within +-LOG_RATIO_BOUND, ascending with it: float32 integers plus
    a half, to be truncated to an index."""
    x = log_ratio.float().nan_to_num_()  # a NaN is refused later, and needs a bin until then
    magnitude = x.abs().mul_(1 / LINEAR).log1p_().mul_(DENSITY)
    return magnitude.copysign_(x).add_(MAGNITUDES + 0.5)


def percentiles(counts_CN: npt.NDArray[np.float64], percents: tuple[int, ...]) -> list[list[float]]:
    """The smallest log ratio with this percentage at or below it, for each histogram.

    Args:
        counts_CN: C histograms of N = BINS bins each.
        percents: from 0 to 100.

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
