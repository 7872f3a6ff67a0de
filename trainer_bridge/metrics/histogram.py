"""Percentiles of log ratios without sorting: a histogram whose bins are as fine as they are small.

Bins are equally wide in sign(x) log(1 + |x| / 2^-20), 64 of them to each factor of e. So a
percentile is exact to 0.8% of its own log ratio (and of 2^-20), and the histograms of all blocks
and ranks just add up.
"""

import math

import numpy as np
import numpy.typing as npt
import torch

from trainer_bridge.metrics.mismatch import LOG_RATIO_BOUND

LINEAR = 2.0**-20  # |x| from where on bins grow
DENSITY = 64  # bins to a factor of e
RELATIVE_ERROR = math.expm1(1 / (2 * DENSITY))  # of |x| + LINEAR: half a bin, 0.8%

MAGNITUDES = math.ceil(DENSITY * math.log1p(LOG_RATIO_BOUND / LINEAR))
BINS = 2 * MAGNITUDES + 1


def bins_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """The bin of each log ratio within +-LOG_RATIO_BOUND, ascending with it: float32 integers and
    a half, to be cut off when they become an index."""
    x = log_ratio.float().nan_to_num_()  # a NaN is refused later, and must find a bin until then
    magnitude = x.abs().mul_(1 / LINEAR).log1p_().mul_(DENSITY)
    return magnitude.copysign_(x).add_(MAGNITUDES + 0.5)


def percentiles(counts_CN: npt.NDArray[np.float64], percents: tuple[int, ...]) -> list[list[float]]:
    """Of each histogram: the smallest log ratio with so many percent at or below it.

    Args:
        counts_CN: C histograms of N = BINS bins each.

    Returns:
        by histogram and percentage: the middle of the bin that the value is in.
    """
    below_CN = torch.from_numpy(counts_CN).cumsum(1).numpy()  # a quarter of NumPy's time
    needed_CK = np.ceil(below_CN[:, -1:] * np.array(percents) / 100).clip(1)
    found = (row.searchsorted(needed) for row, needed in zip(below_CN, needed_CK, strict=True))
    return [[_middle(index) for index in indices.tolist()] for indices in found]


def _middle(index: int) -> float:
    """The log ratio in the middle of a bin."""
    place = index - MAGNITUDES
    return math.copysign(LINEAR * math.expm1(abs(place) / DENSITY), place)
