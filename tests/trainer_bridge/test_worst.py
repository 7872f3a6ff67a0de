"""Where rollout and trainer differ most."""

import math

import pytest
import torch

from trainer_bridge import TokenMismatch, worst_tokens

MASK_BT = torch.tensor([[True, True, True], [True, True, False], [True, True, True]])


def logprobs(**changed: float) -> torch.Tensor:
    """-1 everywhere but at places such as ``at_0_2``."""
    found_BT = torch.full((3, 3), -1.0)
    for place, value in changed.items():
        row, column = map(int, place.split("_")[1:])
        found_BT[row, column] = value
    return found_BT


def test_the_worst_come_first_with_their_place() -> None:
    trainer_BT = logprobs(at_0_2=-16.0, at_1_2=-99.0, at_2_0=-0.5, at_1_1=-1.25)
    rollout_BT = logprobs(at_1_2=99.0, at_1_1=-3.25)
    assert worst_tokens(trainer_BT, rollout_BT, MASK_BT, count=3) == [
        TokenMismatch(0, 2, length=3, alive=2, trainer_logprob=-16.0, rollout_logprob=-1.0),
        TokenMismatch(1, 1, length=2, alive=3, trainer_logprob=-1.25, rollout_logprob=-3.25),
        TokenMismatch(2, 0, length=3, alive=3, trainer_logprob=-0.5, rollout_logprob=-1.0),
    ]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_what_is_no_number_is_worst(value: float) -> None:
    trainer_BT = logprobs(at_0_1=value, at_2_2=-50.0, at_1_2=math.nan)
    found = worst_tokens(trainer_BT, logprobs(), MASK_BT, count=2)
    assert [(token.sequence, token.position) for token in found] == [(0, 1), (2, 2)]


def test_there_are_no_more_than_tokens() -> None:
    assert len(worst_tokens(logprobs(), logprobs(), MASK_BT, count=99)) == 8
    assert worst_tokens(logprobs(), logprobs(), torch.zeros_like(MASK_BT)) == []
    empty_BT = torch.empty(0, 3)
    assert worst_tokens(empty_BT, empty_BT, empty_BT.bool()) == []


def test_gradients_and_dtypes_do_not_matter() -> None:
    trainer_BT = logprobs(at_0_0=-2.0).to(torch.bfloat16).requires_grad_()
    (worst,) = worst_tokens(trainer_BT, logprobs().double(), MASK_BT, count=1)
    assert (worst.sequence, worst.position, worst.trainer_logprob) == (0, 0, -2.0)
