"""The first kernel of a correction: the sums of each row, and whether it passes.

One program per row, all in float64; the reference is ``torch_impl.py``.
"""
# Triton comes without types.
# mypy: disable-error-code="untyped-decorator"

import triton
import triton.language as tl

from trainer_bridge.correction.packed_bounds import OPTIONS, VETO
from trainer_bridge.correction.triton_common import allowed, bounded, expm1, logprobs_of, weighed
from trainer_bridge.metrics.mismatch import NEVER_LARGEST

# A row of ``sums``: first the sequence terms of ``batch_metrics.add_mismatch``; then rejected
# tokens, and 1 if there is one, of all rejections, of the veto, and of each option.
TERMS = 9
BROKEN, WEIGHT_BATCH, WEIGHT_SQUARE, ALL, VETOED, OPTION_SUM = 9, 10, 12, 13, 15, 17
REJECTED = OPTION_SUM + OPTIONS
SUMS = REJECTED + 2 * OPTIONS
# A row of ``maxima``: ``mismatch.ends`` of log ratios, gaps, weights, and of each option.
ENDS, GAP_ENDS, WEIGHT_ENDS, OPTION_ENDS = 0, 2, 4, 6
MAXIMA = OPTION_ENDS + 2 * OPTIONS
KEPT, WEIGHT, CLIPPED, STATES = 0, 1, 2, 3
"""What the second kernel needs of a row: whether it passes; if all its tokens have one weight, that
weight, and 1.0 if it is out of bounds."""

_NEVER, _VETO = tl.constexpr(-NEVER_LARGEST), tl.constexpr(VETO)
_BROKEN, _WEIGHT_BATCH = tl.constexpr(BROKEN), tl.constexpr(WEIGHT_BATCH)
_WEIGHT_SQUARE, _ALL, _VETOED = tl.constexpr(WEIGHT_SQUARE), tl.constexpr(ALL), tl.constexpr(VETOED)
_OPTION_SUM, _REJECTED, _SUMS = tl.constexpr(OPTION_SUM), tl.constexpr(REJECTED), tl.constexpr(SUMS)
_ENDS, _GAP_ENDS, _WEIGHT_ENDS = (
    tl.constexpr(ENDS),
    tl.constexpr(GAP_ENDS),
    tl.constexpr(WEIGHT_ENDS),
)
_OPTION_ENDS, _MAXIMA, _STATES = (
    tl.constexpr(OPTION_ENDS),
    tl.constexpr(MAXIMA),
    tl.constexpr(STATES),
)
_KEPT, _WEIGHT, _CLIPPED = tl.constexpr(KEPT), tl.constexpr(WEIGHT), tl.constexpr(CLIPPED)


# T changes from step to step and must not trigger a compilation.
@triton.jit(do_not_specialize=["T"])
def count_rows(
    trainer: tl.tensor,
    rollout: tl.tensor,
    mask: tl.tensor,
    limits: tl.tensor,
    sums: tl.tensor,
    maxima: tl.tensor,
    states: tl.tensor,
    T: tl.tensor,
    LEVEL: tl.constexpr,
    IS_BAND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row's ``sums``, ``maxima`` and ``states``. LEVEL: 0 no weights, 1 token, 2 sequence, 3
    geometric."""
    row = tl.program_id(0).to(tl.int64)
    none = tl.zeros([BLOCK], tl.float64)
    least = tl.full([BLOCK], _NEVER, tl.float64)
    length, trainers, rollouts, ratios = none, none, none, none
    total1, total2, total3 = none, none, none
    failed1, failed2, failed3, failed = none, none, none, none
    weights, squares = none, none
    low, high, low1, high1, low2, high2 = least, least, least, least, least, least
    low3, high3, low_w, high_w = least, least, least, least
    for begin in range(0, T, BLOCK):
        here, t, r = logprobs_of(trainer, rollout, mask, row, begin + tl.arange(0, BLOCK), T)
        one = here.to(tl.float64)
        x = t - r
        v = bounded(x)
        k1, k2, k3 = -v, v * v / 2, expm1(v) - v
        allowed1 = allowed(k1, limits, 0)
        allowed2 = allowed(k2, limits, 1)
        allowed3 = allowed(k3, limits, 2)
        length += one
        trainers += t
        rollouts += r
        ratios += x
        total1 += k1
        total2 += k2
        total3 += k3
        failed1 += tl.where(allowed1, 0.0, one)
        failed2 += tl.where(allowed2, 0.0, one)
        failed3 += tl.where(allowed3, 0.0, one)
        failed += tl.where(allowed1 & allowed2 & allowed3, 0.0, one)
        low, high = _widened(low, high, x, here)
        low1, high1 = _widened(low1, high1, k1, here)
        low2, high2 = _widened(low2, high2, k2, here)
        low3, high3 = _widened(low3, high3, k3, here)
        if LEVEL == 1:
            weight, _ = weighed(tl.exp(v), limits, IS_BAND)
            weights += weight * one
            squares += weight * weight * one
            low_w, high_w = _widened(low_w, high_w, weight, here)

    L, X = tl.sum(length, 0), tl.sum(ratios, 0)
    count, present = tl.maximum(L, 1.0), tl.minimum(L, 1.0)
    mine, top, state = sums + row * _SUMS, maxima + row * _MAXIMA, states + row * _STATES
    gap = -X / count
    nll_t, nll_r = -tl.sum(trainers, 0) / count, -tl.sum(rollouts, 0) / count
    tl.store(mine + 0, present)
    tl.store(mine + 1, expm1(2 * bounded(X)))
    tl.store(mine + 2, gap)
    tl.store(mine + 3, tl.abs(gap))
    tl.store(mine + 4, expm1(bounded(gap)))
    tl.store(mine + 5, nll_t)
    tl.store(mine + 6, nll_r)
    tl.store(mine + 7, tl.exp(bounded(nll_t)) * present)
    tl.store(mine + 8, tl.exp(bounded(nll_r)) * present)
    tl.store(mine + _BROKEN, (X * 0 != 0).to(tl.float64))
    _store_ends(top + _ENDS, tl.max(low, 0), tl.max(high, 0))
    _store_ends_of_row(top + _GAP_ENDS, gap, L)

    sum1, sum2, sum3 = tl.sum(total1, 0), tl.sum(total2, 0), tl.sum(total3, 0)
    _store_ends(top + _OPTION_ENDS, tl.max(low1, 0), tl.max(high1, 0))
    _store_ends(top + _OPTION_ENDS + 2, tl.max(low2, 0), tl.max(high2, 0))
    _store_ends(top + _OPTION_ENDS + 4, tl.max(low3, 0), tl.max(high3, 0))
    _store_option(mine, 0, sum1, tl.sum(failed1, 0))
    _store_option(mine, 1, sum2, tl.sum(failed2, 0))
    _store_option(mine, 2, sum3, tl.sum(failed3, 0))
    kept = _of_row(mine, top, limits, 3, sum1, L)
    kept &= _of_row(mine, top, limits, 4, sum2, L)
    kept &= _of_row(mine, top, limits, 5, sum3, L)
    kept &= _of_row(mine, top, limits, 6, sum1 / count, L)
    kept &= _of_row(mine, top, limits, 7, sum2 / count, L)
    kept &= _of_row(mine, top, limits, 8, sum3 / count, L)
    kept &= _of_row(mine, top, limits, 9, tl.maximum(tl.max(high2, 0), 0.0), L)
    kept &= _of_row(mine, top, limits, 10, tl.maximum(tl.max(high3, 0), 0.0), L)
    stays = -tl.max(low, 0) >= tl.load(limits + _VETO)  # the smallest log ratio
    _store_count(mine + _VETOED, tl.where(stays, 0.0, L))
    kept &= stays
    _store_count(mine + _ALL, tl.where(kept, tl.sum(failed, 0), L))
    tl.store(state + _KEPT, kept.to(tl.float64))

    if LEVEL == 1:
        tl.store(mine + _WEIGHT_BATCH, tl.sum(weights, 0))
        tl.store(mine + _WEIGHT_BATCH + 1, L)
        tl.store(mine + _WEIGHT_SQUARE, tl.sum(squares, 0))
        _store_ends(top + _WEIGHT_ENDS, tl.max(low_w, 0), tl.max(high_w, 0))
    if LEVEL > 1:
        log_ratio = X if LEVEL == 2 else X / count
        weight, outside = weighed(tl.exp(bounded(log_ratio)), limits, IS_BAND)
        tl.store(state + _WEIGHT, weight)
        tl.store(state + _CLIPPED, outside.to(tl.float64))
        tl.store(mine + _WEIGHT_BATCH, weight * present)
        tl.store(mine + _WEIGHT_BATCH + 1, present)
        tl.store(mine + _WEIGHT_SQUARE, weight * weight * L)
        _store_ends_of_row(top + _WEIGHT_ENDS, weight, L)


@triton.jit
def _widened(
    low: tl.tensor, high: tl.tensor, value: tl.tensor, here: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Largest of -value and of value so far."""
    low = tl.maximum(low, tl.where(here, -value, _NEVER))
    return low, tl.maximum(high, tl.where(here, value, _NEVER))


@triton.jit
def _store_ends(target: tl.tensor, low: tl.tensor, high: tl.tensor) -> None:
    tl.store(target, low)
    tl.store(target + 1, high)


@triton.jit
def _store_ends_of_row(target: tl.tensor, statistic: tl.tensor, L: tl.tensor) -> None:
    """The same for one value per row, if the row has tokens."""
    there = L > 0
    low, high = tl.where(there, -statistic, _NEVER), tl.where(there, statistic, _NEVER)
    _store_ends(target, low, high)


@triton.jit
def _store_count(target: tl.tensor, rejected: tl.tensor) -> None:
    """Store the number of rejected tokens, and whether there is one."""
    tl.store(target, rejected)
    tl.store(target + 1, (rejected > 0).to(tl.float64))


@triton.jit
def _store_option(
    mine: tl.tensor, option: tl.constexpr, total: tl.tensor, rejected: tl.tensor
) -> None:
    tl.store(mine + _OPTION_SUM + option, total)
    _store_count(mine + _REJECTED + 2 * option, rejected)


@triton.jit
def _of_row(
    mine: tl.tensor,
    top: tl.tensor,
    limits: tl.tensor,
    option: tl.constexpr,
    statistic: tl.tensor,
    L: tl.tensor,
) -> tl.tensor:
    """Count an option that bounds a whole row; return whether the row passes."""
    passes = allowed(statistic, limits, option)
    _store_ends_of_row(top + _OPTION_ENDS + 2 * option, statistic, L)
    _store_option(mine, option, statistic, tl.where(passes, 0.0, L))
    return passes
