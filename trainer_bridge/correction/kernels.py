"""Correction of a batch in two launches: what rows add up to, then weights, mask and token sums.

They compute in float64 what ``rows.py`` does op by op, whose 130 launches and more take a GPU
longer than the tokens do. A program of the first kernel has a row, one of the second a part of it.

Shapes: B sequences, T tokens of the longest response.
"""
# Triton comes without types.
# mypy: disable-error-code="untyped-decorator"

import triton
import triton.language as tl

from trainer_bridge.metrics.histogram import BINS, DENSITY, LINEAR, MAGNITUDES
from trainer_bridge.metrics.mismatch import LOG_RATIO_BOUND, NEVER_LARGEST

# Where ``limits`` has the bounds of the options, the log of the veto and the bounds of weights.
REACHES = ("token", "seq_sum", "seq_mean", "seq_max")
OPTIONS = 3 * len(REACHES)
"""Of each reach k1, k2, k3; bounds of what was not asked for are infinite."""
LOWEST, HIGHEST, VETO, WEIGHT_LOWEST, WEIGHT_HIGHEST = 0, OPTIONS, 24, 25, 26

# What ``sums`` has of a row: the terms of ``report.sequence_terms`` first; then rejected tokens,
# and 1 if there is one, by all rejections, by the veto, and by each option.
TERMS = 9
BROKEN, WEIGHT_BATCH, WEIGHT_SQUARE, ALL, VETOED, OPTION_SUM, REJECTED = 9, 10, 12, 13, 15, 17, 29
SUMS = REJECTED + 2 * OPTIONS
# What ``maxima`` has of it: ``mismatch.ends`` of log ratios, gaps, weights, and of each option.
ENDS, GAP_ENDS, WEIGHT_ENDS, OPTION_ENDS = 0, 2, 4, 6
MAXIMA = OPTION_ENDS + 2 * OPTIONS
KEPT, WEIGHT, CLIPPED, STATES = 0, 1, 2, 3
"""What the second kernel needs of a row: whether it passes, and weight and 1.0 if outside of the
bounds where all its tokens weigh the same."""
TOKEN_TERMS = 11
"""The terms of ``report.token_terms``, then weight, clipped, masked."""

_BOUND, _NEVER = tl.constexpr(LOG_RATIO_BOUND), tl.constexpr(-NEVER_LARGEST)
_BINS, _DENSITY = tl.constexpr(BINS), tl.constexpr(float(DENSITY))
_GROWTH, _MIDDLE = tl.constexpr(1 / LINEAR), tl.constexpr(MAGNITUDES + 0.5)
_LOWEST, _HIGHEST, _VETO = tl.constexpr(LOWEST), tl.constexpr(HIGHEST), tl.constexpr(VETO)
_WEIGHT_LOWEST, _WEIGHT_HIGHEST = tl.constexpr(WEIGHT_LOWEST), tl.constexpr(WEIGHT_HIGHEST)
_BROKEN, _WEIGHT_BATCH = tl.constexpr(BROKEN), tl.constexpr(WEIGHT_BATCH)
_WEIGHT_SQUARE, _ALL, _VETOED = tl.constexpr(WEIGHT_SQUARE), tl.constexpr(ALL), tl.constexpr(VETOED)
_OPTION_SUM, _REJECTED, _SUMS = tl.constexpr(OPTION_SUM), tl.constexpr(REJECTED), tl.constexpr(SUMS)
_ENDS, _GAP_ENDS = tl.constexpr(ENDS), tl.constexpr(GAP_ENDS)
_WEIGHT_ENDS, _OPTION_ENDS = tl.constexpr(WEIGHT_ENDS), tl.constexpr(OPTION_ENDS)
_MAXIMA, _STATES, _TOKEN_TERMS = (
    tl.constexpr(MAXIMA),
    tl.constexpr(STATES),
    tl.constexpr(TOKEN_TERMS),
)
_KEPT, _WEIGHT, _CLIPPED = tl.constexpr(KEPT), tl.constexpr(WEIGHT), tl.constexpr(CLIPPED)


# T and the number of versions change from step to step, and must not compile anew.
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
        here, t, r = _logprobs(trainer, rollout, mask, row, begin + tl.arange(0, BLOCK), T)
        one = here.to(tl.float64)
        x = t - r
        v = _bounded(x)
        k1, k2, k3 = -v, v * v / 2, _expm1(v) - v
        allowed1 = _allowed(k1, limits, 0)
        allowed2 = _allowed(k2, limits, 1)
        allowed3 = _allowed(k3, limits, 2)
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
            weight, _ = _weighed(tl.exp(v), limits, IS_BAND)
            weights += weight * one
            squares += weight * weight * one
            low_w, high_w = _widened(low_w, high_w, weight, here)

    L, X = tl.sum(length, 0), tl.sum(ratios, 0)
    count, present = tl.maximum(L, 1.0), tl.minimum(L, 1.0)
    mine, top, state = sums + row * _SUMS, maxima + row * _MAXIMA, states + row * _STATES
    gap = -X / count
    nll_t, nll_r = -tl.sum(trainers, 0) / count, -tl.sum(rollouts, 0) / count
    tl.store(mine + 0, present)
    tl.store(mine + 1, _expm1(2 * _bounded(X)))
    tl.store(mine + 2, gap)
    tl.store(mine + 3, tl.abs(gap))
    tl.store(mine + 4, _expm1(_bounded(gap)))
    tl.store(mine + 5, nll_t)
    tl.store(mine + 6, nll_r)
    tl.store(mine + 7, tl.exp(_bounded(nll_t)) * present)
    tl.store(mine + 8, tl.exp(_bounded(nll_r)) * present)
    tl.store(mine + _BROKEN, (X * 0 != 0).to(tl.float64))
    _store_ends(top + _ENDS, tl.max(low, 0), tl.max(high, 0))
    _store_ends_of_row(top + _GAP_ENDS, gap, L)

    sum1, sum2, sum3 = tl.sum(total1, 0), tl.sum(total2, 0), tl.sum(total3, 0)
    most1, most2, most3 = tl.max(high1, 0), tl.max(high2, 0), tl.max(high3, 0)
    _store_option(mine, top, 0, sum1, tl.max(low1, 0), most1, tl.sum(failed1, 0))
    _store_option(mine, top, 1, sum2, tl.max(low2, 0), most2, tl.sum(failed2, 0))
    _store_option(mine, top, 2, sum3, tl.max(low3, 0), most3, tl.sum(failed3, 0))
    kept = _of_row(mine, top, limits, 3, sum1, L)
    kept &= _of_row(mine, top, limits, 4, sum2, L)
    kept &= _of_row(mine, top, limits, 5, sum3, L)
    kept &= _of_row(mine, top, limits, 6, sum1 / count, L)
    kept &= _of_row(mine, top, limits, 7, sum2 / count, L)
    kept &= _of_row(mine, top, limits, 8, sum3 / count, L)
    kept &= _of_row(mine, top, limits, 9, tl.maximum(most1, 0.0), L)
    kept &= _of_row(mine, top, limits, 10, tl.maximum(most2, 0.0), L)
    kept &= _of_row(mine, top, limits, 11, tl.maximum(most3, 0.0), L)
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
        weight, outside = _weighed(tl.exp(_bounded(log_ratio)), limits, IS_BAND)
        tl.store(state + _WEIGHT, weight)
        tl.store(state + _CLIPPED, outside.to(tl.float64))
        tl.store(mine + _WEIGHT_BATCH, weight * present)
        tl.store(mine + _WEIGHT_BATCH + 1, present)
        tl.store(mine + _WEIGHT_SQUARE, weight * weight * L)
        _store_ends_of_row(top + _WEIGHT_ENDS, weight, L)


@triton.jit(do_not_specialize=["T", "known"])
def count_tokens(
    trainer: tl.tensor,
    rollout: tl.tensor,
    mask: tl.tensor,
    versions: tl.tensor,
    known_versions: tl.tensor,
    starts: tl.tensor,
    limits: tl.tensor,
    states: tl.tensor,
    weights: tl.tensor,
    kept: tl.tensor,
    old: tl.tensor,
    sums: tl.tensor,
    histogram: tl.tensor,
    T: tl.tensor,
    known: tl.tensor,
    POSITIONS: tl.constexpr,
    COPIES: tl.constexpr,
    LEVEL: tl.constexpr,
    IS_BAND: tl.constexpr,
    APPLIES: tl.constexpr,
    KEEPS_ROLLOUT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Weights, mask and old logprobs of a part of a row; its terms into ``sums`` [program, groups,
    TOKEN_TERMS] and its tokens into a copy of ``histogram`` [COPIES, groups, BINS], both zeros.

    Groups are of positions, which begin at ``starts`` and end where the next begins, and of the
    ``known`` first of ``known_versions``.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    at = first + tl.arange(0, BLOCK)
    inside = at < T
    place = row * T + at
    here, t, r = _logprobs(trainer, rollout, mask, row, at, T)
    one = here.to(tl.float64)
    x = t - r
    v = _bounded(x)
    ratio, excess = tl.exp(v), _expm1(v)
    state = states + row * _STATES
    allowed = _allowed(-v, limits, 0) & _allowed(v * v / 2, limits, 1)
    allowed &= _allowed(excess - v, limits, 2)
    stays = tl.where(allowed, one * tl.load(state + _KEPT), 0.0)
    weight, clipped = one, one * 0
    if LEVEL == 1:
        weight, outside = _weighed(ratio, limits, IS_BAND)
        weight, clipped = weight * one, outside.to(tl.float64) * one
    if LEVEL > 1:
        weight, clipped = tl.load(state + _WEIGHT) * one, tl.load(state + _CLIPPED) * one
    applied = weight * stays if APPLIES else stays
    tl.store(weights + place, applied.to(tl.float32), mask=inside)
    tl.store(kept + place, stays.to(tl.uint8), mask=inside)
    tl.store(old + place, (r if KEEPS_ROLLOUT else t).to(tl.float32), mask=inside)

    # In float32, as histogram.bins_of. A NaN is refused later, and must find a bin until then.
    small = tl.where(v == v, v, 0.0).to(tl.float32)
    magnitude = tl.log(1.0 + tl.abs(small) * _GROWTH) * _DENSITY
    bins = (tl.where(small < 0, -magnitude, magnitude) + _MIDDLE).to(tl.int32)
    counted = ratio * one
    error = tl.maximum(ratio, 1 / ratio) - 1
    program = row * tl.num_programs(1) + tl.program_id(1)
    mine = sums + program * ((POSITIONS + known) * _TOKEN_TERMS)
    counts = histogram + (program % COPIES) * ((POSITIONS + known) * _BINS)
    for group in range(POSITIONS + known):
        chosen = here
        if group < POSITIONS:
            begin, end = tl.load(starts + group), tl.load(starts + group + 1)
            chosen &= (at >= begin) & (at < end)
        else:
            version = tl.load(known_versions + group - POSITIONS)
            chosen &= tl.load(versions + place, mask=inside, other=0) == version
        if tl.max(chosen.to(tl.int32), 0) > 0:
            tl.atomic_add(counts + group * _BINS + bins, 1, mask=chosen, sem="relaxed")
            slot = mine + group * _TOKEN_TERMS
            _store_sum(slot + 0, one, chosen)
            _store_sum(slot + 1, x, chosen)
            _store_sum(slot + 2, excess, chosen)
            _store_sum(slot + 3, counted, chosen)
            _store_sum(slot + 4, counted * counted, chosen)
            _store_sum(slot + 5, tl.abs(x), chosen)
            _store_sum(slot + 6, error, chosen)
            _store_sum(slot + 7, r, chosen)
            _store_sum(slot + 8, weight, chosen)
            _store_sum(slot + 9, clipped, chosen)
            _store_sum(slot + 10, one - stays, chosen)


@triton.jit
def _logprobs(
    trainer: tl.tensor,
    rollout: tl.tensor,
    mask: tl.tensor,
    row: tl.tensor,
    at: tl.tensor,
    T: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The mask, and both logprobs, 0 outside of it."""
    place = row * T + at
    here = tl.load(mask + place, mask=at < T, other=0) != 0
    t = tl.load(trainer + place, mask=here, other=0.0).to(tl.float64)
    r = tl.load(rollout + place, mask=here, other=0.0).to(tl.float64)
    return here, t, r


@triton.jit
def _bounded(log_ratio: tl.tensor) -> tl.tensor:
    return tl.minimum(tl.maximum(log_ratio, -_BOUND), _BOUND)


@triton.jit
def _expm1(v: tl.tensor) -> tl.tensor:
    """exp(v) - 1 to a few roundings, also where v is small: W. Kahan's way, in N. Higham, Accuracy
    and Stability of Numerical Algorithms, 2002, section 1.14.1."""
    u = tl.exp(v)
    return tl.where(u == 1.0, v, (u - 1.0) * v / tl.log(u))


@triton.jit
def _allowed(statistic: tl.tensor, limits: tl.tensor, option: tl.constexpr) -> tl.tensor:
    lowest, highest = tl.load(limits + _LOWEST + option), tl.load(limits + _HIGHEST + option)
    return (statistic >= lowest) & (statistic <= highest)


@triton.jit
def _weighed(
    ratio: tl.tensor, limits: tl.tensor, IS_BAND: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The weight, and whether the ratio is out of bounds."""
    highest = tl.load(limits + _WEIGHT_HIGHEST)
    outside = (ratio < tl.load(limits + _WEIGHT_LOWEST)) | (ratio > highest)
    if IS_BAND:
        return tl.where(outside, 0.0, ratio), outside
    else:
        return tl.minimum(ratio, highest), outside


@triton.jit
def _widened(
    low: tl.tensor, high: tl.tensor, value: tl.tensor, here: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Largest of -value and of value so far."""
    low = tl.maximum(low, tl.where(here, -value, _NEVER))
    return low, tl.maximum(high, tl.where(here, value, _NEVER))


@triton.jit
def _store_sum(target: tl.tensor, term: tl.tensor, chosen: tl.tensor) -> None:
    tl.store(target, tl.sum(tl.where(chosen, term, 0.0), 0))


@triton.jit
def _store_ends(target: tl.tensor, low: tl.tensor, high: tl.tensor) -> None:
    tl.store(target, low)
    tl.store(target + 1, high)


@triton.jit
def _store_ends_of_row(target: tl.tensor, statistic: tl.tensor, L: tl.tensor) -> None:
    """Of a row that has a token."""
    there = L > 0
    low, high = tl.where(there, -statistic, _NEVER), tl.where(there, statistic, _NEVER)
    _store_ends(target, low, high)


@triton.jit
def _store_count(target: tl.tensor, rejected: tl.tensor) -> None:
    """Rejected tokens, and whether there is one."""
    tl.store(target, rejected)
    tl.store(target + 1, (rejected > 0).to(tl.float64))


@triton.jit
def _store_option(
    mine: tl.tensor,
    top: tl.tensor,
    option: tl.constexpr,
    total: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    rejected: tl.tensor,
) -> None:
    tl.store(mine + _OPTION_SUM + option, total)
    _store_ends(top + _OPTION_ENDS + 2 * option, low, high)
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
    """Count an option that bounds a whole row; returns whether the row passes."""
    passes = _allowed(statistic, limits, option)
    there = L > 0
    low, high = tl.where(there, -statistic, _NEVER), tl.where(there, statistic, _NEVER)
    _store_option(mine, top, option, statistic, low, high, tl.where(passes, 0.0, L))
    return passes
