"""What runs say: pairs against scipy, a control that must be worse, rows and their table."""

import random
from statistics import fmean
from typing import Any

import pytest

from benchmarks.learning.results import ALPHA, K3, SHARE, compare, table
from benchmarks.learning.study import ARMS, CONTROL, REFERENCE

GAIN = 0.4
ENVIRONMENT = {"device": "a GPU", "versions": {"torch": "2"}, "date": "2026-01-01", "commit": "abc"}


@pytest.mark.parametrize("loss", [0.0, 0.05, 0.079, 0.081, 0.12])
def test_verdicts_are_those_of_one_sided_paired_t_tests(loss: float) -> None:
    stats = pytest.importorskip("scipy.stats")
    rng = random.Random(loss)
    seen = set()
    for spread in (0.001, 0.02, 0.08):
        for n in (2, 4, 6):
            theirs = [rng.gauss(0.7, 0.02) for _ in range(n)]
            ours = [reward - loss + rng.gauss(0, spread) for reward in theirs]
            pairs, share, interval, found = compare(ours, theirs, GAIN)
            less = {
                side: stats.ttest_rel(
                    [reward + SHARE * GAIN for reward in ours], theirs, alternative=side
                ).pvalue
                for side in ("less", "greater")
            }
            worse, same = (less[side] < ALPHA for side in ("less", "greater"))
            assert found == ("worse" if worse else "same" if same else "undecided")
            assert (pairs, share) == (str(n), f"{(fmean(theirs) - fmean(ours)) / GAIN:.0%}")
            low, high = map(float, interval.split(" to "))
            assert low <= fmean(ours) - fmean(theirs) + 5e-4 and high >= low
            seen.add(found)
    assert len(seen) > 1 or loss == 0.12


def test_a_single_pair_and_a_reference_that_learned_nothing_decide_nothing() -> None:
    assert compare([0.1], [0.7], GAIN) == ("1", "150%", "", "undecided")
    assert compare([0.1, 0.2], [0.7, 0.8], 0.0)[-1].startswith("undecided")


def rows(of_control: float) -> list[dict[str, Any]]:
    """Four seeds of three arms, of which the first one's last run was not evaluated."""
    ends = {REFERENCE: 0.7, "kv8-tis": 0.69, CONTROL: of_control}
    made: list[dict[str, Any]] = [{"kind": "environment", **ENVIRONMENT}]
    made.append({"kind": "start", "held_out": {"reward": 0.3}})
    for arm, end in ends.items():
        for seed in range(4):
            series = {"reward": [0.3] * 5 + [end] * 20, K3: [1e-3] * 25}
            series[f"position_64/{K3}"] = [2e-3] * 25
            alarms = {"3": [{}]} if arm == CONTROL else {}
            run = {"kind": "run", "arm": arm, "seed": seed, "series": series, "alarms": alarms}
            made.append(run | {"held_out": {"reward": end + 0.001 * seed * (arm != REFERENCE)}})
    del made[-1]["held_out"]
    return [row | {"execution": "one"} for row in made]


@pytest.mark.parametrize(("end", "says"), [(0.35, "a loss is seen"), (0.68, "may not have been")])
def test_the_control_says_whether_a_loss_can_be_seen(end: float, says: str) -> None:
    text = table(rows(end))
    assert [line.split(" | ")[0][2:] for line in text.splitlines()[2:5]] == [
        name for name in ARMS if name in (REFERENCE, "kv8-tis", CONTROL)
    ]
    of = {line.split(" | ")[0][2:]: line.split(" | ") for line in text.splitlines()[2:5]}
    assert of["kv8-tis"][3:5] == ["4", "2%"] and of["kv8-tis"][6:8] == ["same", "0.690"]
    assert of["kv8-tis"][8:] == ["1.0e-03", "", "2.0e-03", "", "0 of 100 |"]
    assert of[CONTROL][3] == "3" and of[CONTROL][-1] == "4 of 100 |"
    assert says in text and "a GPU, torch 2, commit abc" in text


def test_executions_are_paired_by_themselves() -> None:
    other = [row | {"execution": "two"} for row in rows(0.35) if row.get("arm") != REFERENCE]
    assert "| kv8-tis | 8 | 0.692 | 4 |" in table([*rows(0.35), *other])
