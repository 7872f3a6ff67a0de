"""Per-token functions of both correction kernels; the reference is ``metrics.mismatch``."""
# Triton comes without types.
# mypy: disable-error-code="untyped-decorator"

import triton
import triton.language as tl

from trainer_bridge.correction.packed_bounds import HIGHEST, LOWEST, WEIGHT_HIGHEST, WEIGHT_LOWEST
from trainer_bridge.metrics.mismatch import LOG_RATIO_BOUND

_BOUND = tl.constexpr(LOG_RATIO_BOUND)
_LOWEST, _HIGHEST = tl.constexpr(LOWEST), tl.constexpr(HIGHEST)
_WEIGHT_LOWEST, _WEIGHT_HIGHEST = tl.constexpr(WEIGHT_LOWEST), tl.constexpr(WEIGHT_HIGHEST)


@triton.jit
def logprobs_of(
    trainer: tl.tensor,
    rollout: tl.tensor,
    mask: tl.tensor,
    row: tl.tensor,
    at: tl.tensor,
    T: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The mask, and both logprobs, which are 0 outside it."""
    place = row * T + at
    here = tl.load(mask + place, mask=at < T, other=0) != 0
    t = tl.load(trainer + place, mask=here, other=0.0).to(tl.float64)
    r = tl.load(rollout + place, mask=here, other=0.0).to(tl.float64)
    return here, t, r


@triton.jit
def bounded(log_ratio: tl.tensor) -> tl.tensor:
    """The log ratio clamped to the bounds before exp."""
    return tl.minimum(tl.maximum(log_ratio, -_BOUND), _BOUND)


@triton.jit
def expm1(v: tl.tensor) -> tl.tensor:
    """exp(v) - 1 to a few roundings, also for small v: W. Kahan's formula, in N. Higham, Accuracy
    and Stability of Numerical Algorithms, 2002, section 1.14.1."""
    u = tl.exp(v)
    return tl.where(u == 1.0, v, (u - 1.0) * v / tl.log(u))


@triton.jit
def allowed(statistic: tl.tensor, limits: tl.tensor, option: tl.constexpr) -> tl.tensor:
    """Whether the statistic passes a rejection."""
    lowest, highest = tl.load(limits + _LOWEST + option), tl.load(limits + _HIGHEST + option)
    return (statistic >= lowest) & (statistic <= highest)


@triton.jit
def weighed(
    ratio: tl.tensor, limits: tl.tensor, IS_BAND: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The weight, and whether the ratio is out of bounds."""
    highest = tl.load(limits + _WEIGHT_HIGHEST)
    outside = (ratio < tl.load(limits + _WEIGHT_LOWEST)) | (ratio > highest)
    if IS_BAND:
        return tl.where(outside, 0.0, ratio), outside
    else:
        return tl.minimum(ratio, highest), outside
