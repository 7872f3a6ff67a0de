"""Is an arm the same as its reference? Tests on differences that are paired by seed, their power.

Student's t is computed by its closed form
for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean, stdev

import numpy as np

DRAWS = 200_000
"""Simulated experiments behind a power, whose standard error is then 0.0011 at most."""


@dataclass(frozen=True)
class Comparison:
    """An arm less its reference, over the seeds that both have."""

    differences: tuple[float, ...]
    mean: float
    interval: tuple[float, float] | None
    """Of the mean, at confidence 1 - 2 alpha: the arm is equivalent where it is within the margin.
    None for a single seed."""
    p_t: float | None
    """Two-sided paired t test of no difference."""
    p_permutation: float
    """Two-sided exact test of no difference: how many flips of signs have a mean as far from 0."""
    p_tost: float | None
    """Two one-sided t tests: that the difference is at least the margin, either way."""
    spread: float | None
    """Standard deviation of the differences."""

    @property
    def least_p_permutation(self) -> float:
        """The smallest p that so many seeds can give."""
        return 2.0 ** (1 - len(self.differences))


def compare(
    arm: Sequence[float], reference: Sequence[float], margin: float, alpha: float
) -> Comparison:
    """Compare results of the same seeds, in the same order.

    Raises:
        ValueError: they are not pairs, or there are none.
    """
    if len(arm) != len(reference) or not arm:
        raise ValueError(
            f"{len(arm)} results beside {len(reference)}; give one of each for every seed"
        )
    differences = [a - b for a, b in zip(arm, reference, strict=True)]
    mean, n = fmean(differences), len(differences)
    permutation = _permutation(differences)
    if n == 1:
        return Comparison((mean,), mean, None, None, permutation, None, None)
    spread = stdev(differences)
    error = max(spread, 1e-12) / math.sqrt(n)
    half = t_quantile(1 - alpha, n - 1) * error
    upper = 1 - t_cdf((mean + margin) / error, n - 1)
    lower = t_cdf((mean - margin) / error, n - 1)
    return Comparison(
        tuple(differences),
        mean,
        (mean - half, mean + half),
        2 * (1 - t_cdf(abs(mean) / error, n - 1)),
        permutation,
        max(upper, lower),
        spread,
    )


def powers(spread: float, n: int, margin: float, alpha: float) -> tuple[float, float]:
    """Power of the t test against a difference of ``margin``, and of TOST where there is none.

    Args:
        spread: standard deviation of the differences.
        n: seeds, at least 2.
    """
    rng = np.random.default_rng(0)
    noise = spread * rng.standard_normal((DRAWS, n))
    error = np.maximum(noise.std(1, ddof=1), 1e-12) / math.sqrt(n)
    mean = noise.mean(1)
    found = np.abs(mean + margin) > t_quantile(1 - alpha / 2, n - 1) * error
    same = np.abs(mean) + t_quantile(1 - alpha, n - 1) * error < margin
    return float(found.mean()), float(same.mean())


def t_cdf(t: float, freedom: int) -> float:
    """P(T <= t) of Student's t with ``freedom`` degrees of freedom, a whole number from 1."""
    theta = math.atan(t / math.sqrt(freedom))
    sine, square = math.sin(theta), math.cos(theta) ** 2
    term = math.cos(theta) if freedom % 2 else 1.0
    total = 0.0
    first = 1 if freedom % 2 else 0
    for power in range(first, freedom - 1, 2):
        total += term
        term *= square * (power + 1) / (power + 2)
    inside = 2 / math.pi * (theta + sine * total) if freedom % 2 else sine * total
    return (1 + inside) / 2


def t_quantile(p: float, freedom: int) -> float:
    """Where ``t_cdf`` is p."""
    low, high = -1e6, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < p else (low, middle)
    return (low + high) / 2


def _permutation(differences: Sequence[float]) -> float:
    observed = abs(sum(differences)) - 1e-12
    flips = list(product((1, -1), repeat=len(differences)))
    far = sum(
        abs(sum(s * d for s, d in zip(signs, differences, strict=True))) >= observed
        for signs in flips
    )
    return far / len(flips)
