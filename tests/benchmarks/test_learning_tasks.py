"""The study's tasks: rewards by a program that knows nothing of the teacher, and his slips."""

import random
import re
from statistics import fmean

import pytest

from benchmarks.learning import sampling, tasks
from benchmarks.learning.study import CONTEXT
from examples.grpo.arithmetic import END, decode, encode
from trainer_bridge import Rollout

OF_LEVELS = [(kind, level) for kind in tasks.KINDS for level in tasks.LEVELS]
EACH = [*OF_LEVELS, *((kind, tasks.LONG) for kind in tasks.KINDS)]
DRAWS = 60


def answer_of(prompt: str) -> str:
    """The answer by Python's own arithmetic."""
    body = prompt[1:-1]
    if prompt[0] == "S":
        return "".join(sorted(body))
    assert re.fullmatch(r"[-+*0-9]+", body)
    return str(eval(body))  # a product, or a sum of signed terms


def drawn(kind: str, level: int) -> list[tuple[tasks.Problem, random.Random]]:
    rng = random.Random(f"{kind} {level}")
    return [(tasks.KINDS[kind].make(level, rng), rng) for _ in range(DRAWS)]


@pytest.mark.parametrize(("kind", "level"), EACH)
def test_a_teacher_who_never_slips_is_right(kind: str, level: int) -> None:
    for problem, rng in drawn(kind, level):
        response = tasks.demonstrate(problem, rng, slip=0.0)
        assert problem.answer == answer_of(problem.prompt)
        assert tasks.reward(problem, response) == 1.0
        assert len(response) <= tasks.max_new_tokens([level])
        assert len(problem.prompt) + tasks.max_new_tokens([level]) < CONTEXT
        # The controls: cut off, another answer, the answer's beginning, nothing.
        assert tasks.reward(problem, response.removesuffix(END)) == 0.0
        assert tasks.reward(problem, response.removesuffix(END) + "1" + END) == 0.0
        assert tasks.reward(problem, END) == 0.0
        assert decode(encode(problem.prompt + response)) == problem.prompt + response


@pytest.mark.parametrize(("kind", "level"), EACH)
def test_a_teacher_who_slips_is_sometimes_right(kind: str, level: int) -> None:
    rewards = [tasks.reward(p, tasks.demonstrate(p, rng)) for p, rng in drawn(kind, level) * 3]
    assert 0.1 < fmean(rewards) < 0.75  # 0.20 (long products) to 0.55 over 600 draws each
    with_slips = [tasks.reward(p, tasks.demonstrate(p, rng, 0.9)) for p, rng in drawn(kind, level)]
    assert fmean(with_slips) < 0.2


def test_held_out_problems_are_never_trained_on() -> None:
    training = tasks.draw_problems(400, "0 step 3")
    held_out = tasks.draw_problems(400, "evaluation", held_out=True)
    assert not any(map(tasks.is_held_out, training))
    assert all(map(tasks.is_held_out, held_out))
    assert {(p.kind, p.level) for p in training} == {(p.kind, p.level) for p in held_out}
    assert {(p.kind, p.level) for p in training} == {*OF_LEVELS}
    assert tasks.draw_problems(5, "0 step 3") == training[:5]
    assert tasks.draw_problems(5, "0 step 4") != training[:5]


def test_rewards_and_the_shape_of_a_batch() -> None:
    problem = tasks.Problem("product", 1, "P9*9=", "81")
    responses = ["9*9+0=81:81\n", "9*9+0=72:72\n", "9*9+0"]
    tokens = [encode(response) for response in responses]
    batch = Rollout(
        prompt_tokens=[encode(problem.prompt)] * 3,
        tokens=tokens,
        logprobs=[[-0.5] * len(row) for row in tokens],
        versions=[[0] * len(row) for row in tokens],
        finish_reasons=["stop", "stop", "length"],
        temperature=1.0,
    )
    assert sampling.rewards_of(tasks.worked_out(), [problem], batch) == [1.0, 0.0, 0.0]
    shape = sampling.shape_of(batch)
    assert shape["entropy"] == 0.5
    assert shape["unfinished"] == pytest.approx(1 / 3)
    assert shape["response_tokens"] == pytest.approx(fmean(map(len, responses)))
