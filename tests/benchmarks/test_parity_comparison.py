"""The study's statistics, against scipy where it is installed and against printed tables."""

import math
import random
from statistics import fmean, stdev

import pytest

from benchmarks.parity.comparison import compare, powers, t_cdf, t_quantile

MARGIN, ALPHA = 0.05, 0.05
TABLE = {  # of Student's t: 0.95 and 0.975 quantiles
    1: (6.3138, 12.7062),
    2: (2.9200, 4.3027),
    3: (2.3534, 3.1824),
    4: (2.1318, 2.7764),
    9: (1.8331, 2.2622),
}


@pytest.mark.parametrize("freedom", TABLE)
def test_student_t_by_the_printed_table(freedom: int) -> None:
    for p, t in zip((0.95, 0.975), TABLE[freedom], strict=True):
        assert t_quantile(p, freedom) == pytest.approx(t, abs=1e-4)
        assert t_cdf(t, freedom) == pytest.approx(p, abs=1e-5)
        assert t_cdf(-t, freedom) == pytest.approx(1 - p, abs=1e-5)


def test_student_t_and_the_paired_test_by_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for freedom in range(1, 13):
        for t in (-30.0, -2.5, -0.1, 0.0, 0.7, 4.0):
            assert t_cdf(t, freedom) == pytest.approx(stats.t.cdf(t, freedom), abs=1e-12)
    rng = random.Random(0)
    for n in (2, 3, 5, 8):
        arm, reference = ([rng.gauss(0.8, 0.02) for _ in range(n)] for _ in range(2))
        found = compare(arm, reference, MARGIN, ALPHA)
        assert found.p_t == pytest.approx(stats.ttest_rel(arm, reference).pvalue)
        one_sided = [
            stats.ttest_1samp(found.differences, edge, alternative=side).pvalue
            for edge, side in ((-MARGIN, "greater"), (MARGIN, "less"))
        ]
        assert found.p_tost == pytest.approx(max(one_sided))
        interval = stats.t.interval(
            1 - 2 * ALPHA, n - 1, found.mean, stdev(found.differences) / math.sqrt(n)
        )
        assert found.interval == pytest.approx(interval)
        exact = stats.permutation_test(
            (found.differences,), fmean, permutation_type="samples", n_resamples=math.inf
        )
        assert found.p_permutation == pytest.approx(exact.pvalue)


def test_equivalence_is_the_interval_within_the_margin() -> None:
    reference = [0.80, 0.82, 0.81, 0.79]
    for shift in (-0.06, -0.04, 0.0, 0.03, 0.045, 0.06):
        noise = (0.004, -0.006, 0.001, 0.003)
        arm = [value + shift + e for value, e in zip(reference, noise, strict=True)]
        found = compare(arm, reference, MARGIN, ALPHA)
        assert found.interval is not None
        assert found.p_tost is not None
        assert (found.p_tost < ALPHA) == (max(map(abs, found.interval)) < MARGIN)


def test_few_seeds_cannot_give_a_small_permutation_p() -> None:
    found = compare([0.5, 0.6, 0.7], [0.1, 0.2, 0.3], MARGIN, ALPHA)
    assert found.p_permutation == found.least_p_permutation == 0.25
    assert found.p_t is not None
    assert found.p_t < 1e-6  # the same differences leave the t test no spread
    one = compare([0.5], [0.1], MARGIN, ALPHA)
    assert (one.mean, one.p_t, one.interval) == (0.4, None, None)
    with pytest.raises(ValueError, match="one of each for every seed"):
        compare([0.5], [], MARGIN, ALPHA)


def test_power_is_that_of_simulated_experiments() -> None:
    # Both tests done by hand on simulated seeds.
    rng, spread, n, repeats = random.Random(1), 0.025, 3, 2000
    t, same = 0, 0
    for _ in range(repeats):
        noise = [rng.gauss(0, spread) for _ in range(n)]
        t += compare([0.5 + MARGIN + e for e in noise], [0.5] * n, MARGIN, ALPHA).p_t < ALPHA  # type: ignore[operator]
        same += compare([0.5 + e for e in noise], [0.5] * n, MARGIN, ALPHA).p_tost < ALPHA  # type: ignore[operator]
    found = powers(spread, n, MARGIN, ALPHA)
    assert found == pytest.approx((t / repeats, same / repeats), abs=0.04)  # 3.6 standard errors
    assert powers(0.0, n, MARGIN, ALPHA) == (1.0, 1.0)
    more_seeds = powers(spread, 6, MARGIN, ALPHA)
    assert more_seeds[0] > found[0] + 0.2
    assert more_seeds[1] > found[1] + 0.2
