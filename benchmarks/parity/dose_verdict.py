"""Which arms lost reward to the mismatch, from the rows of results/dose_response.jsonl.

Rewards are paired by execution and seed: an execution's runs of a seed share the machine, the start
and the problems.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Literal

from benchmarks.parity.comparison import Comparison, compare
from benchmarks.parity.dose_arms import DOSE_ARMS
from benchmarks.parity.run_log import Row
from benchmarks.parity.scan import nearest
from benchmarks.parity.settings import ALPHA

SHARE = 0.2
"""Of what the reference has learned. An arm that loses more has lost reward to the mismatch."""
FACTOR = 3.0
"""A dose whose k3 is more than this times its name, or less than this part, is another dose."""
OPEN = "open"
"""What is said of a prediction that the runs cannot decide."""
SEEDS, STARTS = 4, 2
"""What settles a prediction, at least; a seed counts once, in however many executions it ran."""
WINDOW = 10
"""Steps over which rewards in training are averaged, to see when they fall."""
MITIGATIONS = "tis", "mis", "fp8-forward", "controlled"
"""Ends of the names of arms that have one; an uncorrected arm ends in "none"."""

Key = tuple[str, int]
"""Execution and seed."""
Finding = Literal["same", "worse", "undecided"]


@dataclass(frozen=True)
class Verdict:
    """What an arm's pairs with its reference say."""

    comparison: Comparison
    margin: float
    """SHARE of the reference's gain, of reward; means over pairs."""
    found: Finding
    """By two one-sided t tests at ALPHA each: whether the arm loses less than the margin, or more.
    "undecided" is what they cannot tell, and what a single pair gives."""
    seeds: int
    starts: int
    """How many seeds and starts the pairs come from."""
    is_off_dose: bool
    """Whether the dose is another one in any pair."""

    @property
    def is_settled(self) -> bool:
        """Whether there are as many seeds and starts as were asked for before the runs."""
        return self.seeds >= SEEDS and self.starts >= STARTS

    @property
    def loss(self) -> float | None:
        """As ``lost`` has it."""
        return lost(-self.comparison.mean, self.margin / SHARE)


def lost(less: float, gained: float) -> float | None:
    """By how much less reward an arm ends, as a share of what its reference has gained; None if
    that has gained nothing."""
    return less / gained if gained > 0 else None


def is_off_dose(rows: list[Row], runs: Iterable[Row]) -> bool:
    """Whether the scan of the start of any of these runs gave its dose a k3 that is another dose's,
    or was not kept: then what was predicted of the dose stays open."""

    def is_off(run: Row) -> bool:
        arm = DOSE_ARMS[run["arm"]]
        start = run["execution"], arm.model, run["start"]
        scan = [
            row
            for row in rows
            if row["kind"] == "scan" and (row["execution"], row["model"], row["start"]) == start
        ]
        if arm.dose is None:
            return False
        k3 = nearest(scan, arm.dose)["mismatch_kl_k3"] if scan else 0.0
        return not 1 / FACTOR <= k3 / arm.dose <= FACTOR

    return any(map(is_off, runs))


def runs_of(rows: list[Row], arm: str, *kinds: str) -> dict[Key, Row]:
    """An arm's runs, in order; those of kind "run", if no others are asked for."""
    mine = [row for row in rows if row["kind"] in (kinds or ("run",)) and row["arm"] == arm]
    mine.sort(key=lambda row: (row["execution"], row["seed"]))
    return {(row["execution"], row["seed"]): row for row in mine}


def verdicts(rows: list[Row]) -> dict[str, Verdict]:
    """Of each arm that has pairs with its reference, in the order of the arms; a pair counts where
    its start was evaluated."""
    starts = {
        (row["execution"], row["model"], row["start"]): row["held_out"]["reward"]
        for row in rows
        if row["kind"] == "start"
    }
    found = {}
    for arm in DOSE_ARMS.values():
        mine, theirs = (runs_of(rows, name) for name in (arm.name, arm.reference or ""))
        begun_at = {key: (key[0], arm.model, run["start"]) for key, run in theirs.items()}
        both = [key for key in mine if begun_at.get(key) in starts]
        if not both:
            continue
        ours, references = (
            [runs[key]["held_out"]["reward"] for key in both] for runs in (mine, theirs)
        )
        begun = [starts[begun_at[key]] for key in both]
        margin = SHARE * (fmean(references) - fmean(begun))
        comparison = compare(ours, references, max(margin, 1e-9), ALPHA)
        found[arm.name] = Verdict(
            comparison,
            margin,
            _judge(comparison, margin),
            len({seed for _, seed in both}),
            len({theirs[key]["start"] for key in both}),
            is_off_dose(rows, [mine[key] for key in both]),
        )
    return found


def mitigated(rows: list[Row]) -> dict[str, tuple[Comparison, Comparison]]:
    """Each arm that has a mitigation less the uncorrected arm of its dose: the reward of the final
    weights in a BF16 engine, and that of the last steps of training, in the arm's own."""
    found = {}
    for arm, kind in product(DOSE_ARMS, MITIGATIONS):
        if not arm.endswith(f"-{kind}"):
            continue
        mine, theirs = runs_of(rows, arm), runs_of(rows, arm.removesuffix(kind) + "none")
        both = [(mine[key], theirs[key]) for key in mine if key in theirs]
        if both:
            found[arm] = (
                _compared(both, lambda run: run["held_out"]["reward"]),
                _compared(both, lambda run: run["last_reward"]),
            )
    return found


def _compared(both: list[tuple[Row, Row]], reward: Callable[[Row], float]) -> Comparison:
    ours, others = zip(*[(reward(mine), reward(theirs)) for mine, theirs in both], strict=True)
    return compare(ours, others, 0.0, ALPHA)


def _judge(comparison: Comparison, margin: float) -> Finding:
    """A reference that has learned nothing decides nothing."""
    if comparison.interval is None or margin <= 0:
        return "undecided"
    low, high = comparison.interval
    if high < -margin:
        return "worse"
    return "same" if low > -margin else "undecided"


def first_alarm(run: Row) -> int | None:
    """The first step with an alarm."""
    return min((alarm["first_step"] for alarm in run["alarms"].values()), default=None)


def falls_at(run: Row, reference: Row, margin: float) -> int | None:
    """From which step on rewards are lower than the reference's by more than the margin, as means
    of WINDOW steps, and never come back: of the first such window, its first step that is lower."""
    pairs = zip(run["series"]["reward"], reference["series"]["reward"], strict=True)
    less = [theirs - ours for ours, theirs in pairs]
    found = None
    for first in range(len(less) - WINDOW + 1):
        window = less[first : first + WINDOW]
        if fmean(window) <= margin:
            found = None
        elif found is None:
            found = next(step for step, each in enumerate(window, first) if each > margin)
    return found
