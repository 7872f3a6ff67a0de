"""The points of docs/dose_response.md of which a verdict on one arm says nothing, most of them
added for seeds 2 and 3. Runs are compared with others of the same execution and seed."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, median

from benchmarks.parity.dose_verdict import OPEN, SEEDS, is_off_dose, runs_of
from benchmarks.parity.run_log import Row

FIRST_SEED, LATER_SEEDS = 2, 2
"""What was written with seeds 0 and 1 in view is decided by later ones, of which there are two."""
LEFT, PART, NEAR, OWN_SHARE = 1 / 3, 0.5, 0.05, 0.55
"""Of k3; of a loss; of reward; of the held-out reward, in the arm's own engine."""

Runs = list[tuple[Row, ...]]
"""Of several arms side by side, a seed each."""


@dataclass(frozen=True)
class Point:
    """One of them."""

    predicted: str
    runs: Runs
    needed: int
    """How many seeds decide it."""
    found: str
    holds: bool | None
    """None where what was found says nothing of it."""

    @property
    def seeds(self) -> int:
        """How many have run, in one execution or several."""
        return len({run[0]["seed"] for run in self.runs})

    def agrees(self, rows: list[Row]) -> str:
        """Whether it was found as predicted; empty before its seeds have run."""
        if self.seeds < self.needed:
            return ""
        if self.holds is None or is_off_dose(rows, chain.from_iterable(self.runs)):
            return OPEN
        return "yes" if self.holds else "no"


def points(rows: list[Row]) -> Iterator[Point]:
    """All of them, in the order of the page."""
    yield _k3_is_removed(rows)
    yield _sampler_or_numbers(rows)
    yield _forward_or_none(rows)
    for arm, is_above in (("5e-2-none", True), ("5e-2-tis", False), ("5e-2-mis", False)):
        yield _own_engine(rows, arm, is_above)
    yield _tis_is_ahead(rows)


def _k3_is_removed(rows: list[Row]) -> Point:
    runs = _side_by_side(rows, "5e-2-fp8-forward", "5e-2-none", first_seed=0)
    parts = [_k3(ours) / _k3(theirs) for ours, theirs in runs]
    return Point(
        "k3 of `5e-2-fp8-forward`, median of all steps, is below a third of `5e-2-none`'s",
        runs,
        SEEDS,
        ", ".join(f"{part:.0%}" for part in parts),
        all(part < LEFT for part in parts),
    )


def _sampler_or_numbers(rows: list[Row]) -> Point:
    runs = _side_by_side(rows, "bf16", "5e-2-fp8-trainer", "5e-2-none")
    ours, theirs = (
        fmean([_end(run[0]) - _end(run[arm]) for run in runs] or [0.0]) for arm in (1, 2)
    )
    return Point(
        f"1: `5e-2-fp8-trainer` loses at most {PART:.0%} of what `5e-2-none` loses",
        runs,
        LATER_SEEDS,
        f"{ours:.3f} of {theirs:.3f}",
        ours <= PART * theirs if theirs > 0 else None,
    )


def _forward_or_none(rows: list[Row]) -> Point:
    runs = _side_by_side(rows, "5e-2-fp8-forward", "5e-2-none", first_seed=0)
    mean = fmean([_end(ours) - _end(theirs) for ours, theirs in runs] or [0.0])
    return Point(
        f"2: `5e-2-fp8-forward` less `5e-2-none`, the mean, is within {NEAR} of 0",
        runs,
        SEEDS,
        f"{mean:+.3f}",
        abs(mean) <= NEAR,
    )


def _own_engine(rows: list[Row], arm: str, is_above: bool) -> Point:
    runs = _side_by_side(rows, arm)
    shares = [run["last_reward"] / max(_end(run), 1e-9) for (run,) in runs]
    return Point(
        f"3: `{arm}` has {'above' if is_above else 'below'} {OWN_SHARE} of its held-out reward in "
        f"its own engine",
        runs,
        LATER_SEEDS,
        ", ".join(f"{share:.2f}" for share in shares),
        all((share > OWN_SHARE) is is_above for share in shares),
    )


def _tis_is_ahead(rows: list[Row]) -> Point:
    runs = _side_by_side(rows, "1e-2-tis", "1e-2-none")
    differences = [_end(ours) - _end(theirs) for ours, theirs in runs]
    return Point(
        "4: `1e-2-tis` ends above `1e-2-none`",
        runs,
        LATER_SEEDS,
        ", ".join(f"{difference:+.3f}" for difference in differences),
        all(difference > 0 for difference in differences),
    )


def _side_by_side(rows: list[Row], *arms: str, first_seed: int = FIRST_SEED) -> Runs:
    """Runs of the seeds that all of these arms have."""
    first, *others = (runs_of(rows, arm) for arm in arms)
    return [
        (run, *(other[key] for other in others))
        for key, run in first.items()
        if key[1] >= first_seed and all(key in other for other in others)
    ]


def _k3(run: Row) -> float:
    return float(median(run["series"]["mismatch_kl_k3"]))


def _end(run: Row) -> float:
    return float(run["held_out"]["reward"])
