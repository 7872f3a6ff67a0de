"""The second kernel of a correction: weights, mask and old logprobs, and sums over tokens by group.

One program per block of a row, all in float64 except the histogram's bins; the reference is
``torch_impl.py``.
"""
# Triton comes without types.
# mypy: disable-error-code="untyped-decorator"

import triton
import triton.language as tl

from trainer_bridge.correction.triton_common import allowed, bounded, expm1, logprobs_of, weighed
from trainer_bridge.correction.triton_rows import CLIPPED, KEPT, STATES, WEIGHT
from trainer_bridge.metrics.histogram import BINS, DENSITY, LINEAR, MAGNITUDES

TERMS = 11
"""The token terms of ``batch_metrics.add_mismatch``, then weight, clipped, masked."""

_TERMS, _BINS, _DENSITY = tl.constexpr(TERMS), tl.constexpr(BINS), tl.constexpr(float(DENSITY))
_GROWTH, _MIDDLE = tl.constexpr(1 / LINEAR), tl.constexpr(MAGNITUDES + 0.5)
_STATES, _KEPT = tl.constexpr(STATES), tl.constexpr(KEPT)
_WEIGHT, _CLIPPED = tl.constexpr(WEIGHT), tl.constexpr(CLIPPED)


# T and the number of versions change from step to step and must not trigger a compilation.
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
    """Weights, mask and old logprobs of a block of a row. Its terms go into ``sums`` [program,
    groups, TERMS], its tokens into a copy of ``histogram`` [COPIES, groups, BINS]; both start as 0.

    The groups are those of positions, each from its entry of ``starts`` to the next, then the
    first ``known`` of ``known_versions``.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    at = first + tl.arange(0, BLOCK)
    inside = at < T
    place = row * T + at
    here, t, r = logprobs_of(trainer, rollout, mask, row, at, T)
    one = here.to(tl.float64)
    x = t - r
    v = bounded(x)
    ratio, excess = tl.exp(v), expm1(v)
    state = states + row * _STATES
    passes = allowed(-v, limits, 0) & allowed(v * v / 2, limits, 1)
    passes &= allowed(excess - v, limits, 2)
    stays = tl.where(passes, one * tl.load(state + _KEPT), 0.0)
    weight, clipped = one, one * 0
    if LEVEL == 1:
        weight, outside = weighed(ratio, limits, IS_BAND)
        weight, clipped = weight * one, outside.to(tl.float64) * one
    if LEVEL > 1:
        weight, clipped = tl.load(state + _WEIGHT) * one, tl.load(state + _CLIPPED) * one
    applied = weight * stays if APPLIES else stays
    tl.store(weights + place, applied.to(tl.float32), mask=inside)
    tl.store(kept + place, stays.to(tl.uint8), mask=inside)
    tl.store(old + place, (r if KEEPS_ROLLOUT else t).to(tl.float32), mask=inside)

    # In float32, as histogram.bins_of. A NaN is refused later, and needs a bin until then.
    small = tl.where(v == v, v, 0.0).to(tl.float32)
    magnitude = tl.log(1.0 + tl.abs(small) * _GROWTH) * _DENSITY
    bins = (tl.where(small < 0, -magnitude, magnitude) + _MIDDLE).to(tl.int32)
    counted = ratio * one
    error = tl.maximum(ratio, 1 / ratio) - 1
    program = row * tl.num_programs(1) + tl.program_id(1)
    mine = sums + program * ((POSITIONS + known) * _TERMS)
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
            slot = mine + group * _TERMS
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
def _store_sum(target: tl.tensor, term: tl.tensor, chosen: tl.tensor) -> None:
    tl.store(target, tl.sum(tl.where(chosen, term, 0.0), 0))
