"""The task: what a right answer is, and that the teacher is as sloppy as he claims."""

import random

import pytest

from examples.grpo import arithmetic
from examples.grpo.arithmetic import Problem, demonstrate, encode, make_problem, reward

SUM = Problem((3, 5, -2, 4, -1))
MANY = 2000


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("8,6,10,9\n", 1.0),
        ("9\n", 1.0),  # only the last total counts
        ("8,10,14,13\n", 0.0),  # added where the sum subtracts
        ("8,6,10,9", 0.0),  # did not end
        ("8,6,10,9\n\n", 0.0),
        ("8,6,10,09\n", 0.0),
        ("8,6,10,9,\n", 0.0),
        ("\n", 0.0),
        ("", 0.0),
    ],
)
def test_reward(response: str, expected: float) -> None:
    assert reward(SUM, response) == expected


def test_problems_stay_in_their_range() -> None:
    rng = random.Random(0)
    problems = [make_problem(rng) for _ in range(MANY)]
    for problem in problems:
        assert len(problem.terms) == arithmetic.TERMS
        assert all(1 <= abs(term) <= arithmetic.LARGEST_TERM for term in problem.terms)
        totals = [sum(problem.terms[: n + 1]) for n in range(arithmetic.TERMS)]
        assert min(totals) >= 0
        right = demonstrate(problem, rng, slip=0.0)
        assert right == ",".join(map(str, totals[1:])) + "\n"
        assert reward(problem, right) == 1.0
        assert len(right) <= arithmetic.MAX_NEW_TOKENS
    assert len(set(problems)) > MANY / 2  # not one problem again and again


def test_teacher_slips_at_subtractions_only_and_as_often_as_stated() -> None:
    rng = random.Random(0)
    plus = Problem((1, 2, 3, 4, 5))
    assert all(reward(plus, demonstrate(plus, rng)) for _ in range(100))
    minus = Problem((5, 1, 1, 1, -2))
    right = sum(reward(minus, demonstrate(minus, rng)) for _ in range(MANY)) / MANY
    # Seeded: 0.606 was measured; the standard error is 0.011.
    assert abs(right - (1 - arithmetic.SLIP)) < 0.04
    assert demonstrate(minus, rng, slip=1.0) == "6,7,8,10\n"


def test_problems_repeat_by_seed_and_responses_are_scored_by_problem() -> None:
    problems = arithmetic.draw_problems(8, "0 step 3")
    assert arithmetic.draw_problems(8, "0 step 3") == problems
    assert arithmetic.draw_problems(8, "0 step 4") != problems
    other = Problem((1, 1, 1, 1, 9))  # for which 13 is right
    responses = [encode(text) for text in ("8,6,10,9\n", "8,10,14,13\n") * 2]
    assert arithmetic.score([SUM, other], responses) == [1.0, 0.0, 0.0, 1.0]
