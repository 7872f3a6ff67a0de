"""What corrections, metrics and the loss are given: right row by row, or refused in a sentence."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer_bridge.correction_oracle import rollout_of
from trainer_bridge import Correction, correct, mismatch_metrics, policy_loss, worst_tokens
from trainer_bridge.correction import PRESETS, correct_logprobs

Shape = tuple[int, ...]
OLD, WEIGHTS, MASK = "old_logprobs_BT", "weights_BT", "mask_BT"


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Logprobs from -2 to -1, float64."""
    generator = torch.Generator().manual_seed(seed)
    return -1 - torch.rand(shape, generator=generator, dtype=torch.float64)


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool)


def corrected(*shape: int, preset: str = "decoupled_token_is") -> Correction:
    return correct_logprobs(drawn(*shape), drawn(*shape, seed=1), ones(*shape), preset)


def part(correction: Correction, *index: slice) -> Correction:
    """As docs/correction.md takes it."""
    tensors = {name: getattr(correction, name)[index] for name in (OLD, WEIGHTS, MASK)}
    return replace(correction, **tensors)


@st.composite
def shapes(draw: Any, count: int) -> tuple[Shape, list[Shape]]:
    """[B, T], and the shapes of some arguments: often that, or another one that torch may
    broadcast to it."""
    B, T = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    sizes = st.sampled_from([1, B, T])
    other = st.lists(sizes, max_size=3).map(tuple)
    return (B, T), [draw(st.just((B, T)) | st.just((B, 1)) | other) for _ in range(count)]


@given(shapes(2), st.sampled_from([OLD, WEIGHTS, MASK, None]))
@settings(max_examples=300, deadline=None)
def test_a_loss_is_that_of_each_row_or_refused(
    case: tuple[Shape, list[Shape]], odd: str | None
) -> None:
    """``odd``: one tensor of the correction has the shape that the logprobs should have."""
    whole, (shape, of_advantages) = case
    correction = corrected(*whole)
    if odd is not None:
        value = ones(*shape) if odd == MASK else drawn(*shape, seed=2).float()
        correction, shape = replace(correction, **{odd: value}), whole
    logprobs, advantages = drawn(*shape, seed=3), drawn(*of_advantages, seed=4) + 1.5
    same = {tuple(getattr(correction, name).shape) for name in (OLD, WEIGHTS, MASK)} == {whole}
    if not (same and shape == whole and of_advantages in (whole, (whole[0], 1))):
        with pytest.raises(ValueError, match=r"policy_loss: .*shape"):
            policy_loss(logprobs, advantages, correction)
        return
    found = policy_loss(logprobs, advantages, correction)
    assert found.shape == whole
    for row in range(whole[0]):  # a micro-batch has its part of the correction
        mine = slice(row, row + 1)
        alone = policy_loss(logprobs[mine], advantages[mine], part(correction, mine))
        assert torch.equal(alone, found[mine])


CALLS: dict[str, Callable[..., Any]] = {
    "correct": lambda *given, versions: correct_logprobs(*given, versions_BT=versions),
    "mismatch_metrics": lambda *given, versions: mismatch_metrics(*given, versions_BT=versions),
    "worst_tokens": lambda *given, versions: worst_tokens(*given, count=99),
}


@pytest.mark.parametrize("name", CALLS)
@given(shapes(4))
@settings(max_examples=150, deadline=None)
def test_logprobs_are_compared_with_those_of_their_row_or_refused(
    name: str, case: tuple[Shape, list[Shape]]
) -> None:
    _, (of_trainer, of_rollout, of_mask, of_versions) = case
    trainer, rollout, mask = drawn(*of_trainer), drawn(*of_rollout, seed=1), ones(*of_mask)
    seen = {of_trainer, of_rollout, of_mask}
    if name != "worst_tokens":
        seen.add(of_versions)
    versions = torch.zeros(of_versions, dtype=torch.int64)
    if len(seen) > 1 or len(of_trainer) != 2:
        with pytest.raises(ValueError, match=f"{name}: .*shape"):
            CALLS[name](trainer, rollout, mask, versions=versions)
        return
    found = CALLS[name](trainer, rollout, mask, versions=versions)
    x = [
        [t - r for t, r in zip(*rows, strict=True)]
        for rows in zip(trainer.tolist(), rollout.tolist(), strict=True)
    ]
    if name == "correct":
        expected = torch.tensor(x).exp().clamp(max=2.0)
        torch.testing.assert_close(found.weights_BT, expected)
    elif name == "worst_tokens":
        assert len(found) == mask.numel()
        for token in found:
            theirs = token.trainer_logprob - token.rollout_logprob
            assert theirs == x[token.sequence][token.position]
    else:
        flat = [value for row in x for value in row]
        assert found["mismatch_kl_k1"] == pytest.approx(-sum(flat) / len(flat), abs=1e-12)


def test_one_advantage_for_each_row_needs_a_column() -> None:
    """[B] would be [T] to torch, where there are as many tokens as sequences."""
    correction, logprobs = corrected(3, 3), drawn(3, 3)
    advantages = torch.tensor([1.0, -1.0, 0.5])
    with pytest.raises(ValueError, match=r"\(3,\).*\(3, 1\).*advantages"):
        policy_loss(logprobs, advantages, correction)
    assert policy_loss(logprobs, advantages[:, None], correction).sign().tolist() == [
        [-sign] * 3 for sign in (1, -1, 1)
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_advantages_and_logprobs_that_are_no_numbers(value: float) -> None:
    correction = replace(corrected(2, 3), mask_BT=torch.tensor([[True, True, False]] * 2))
    logprobs, advantages = drawn(2, 3), torch.ones(2, 3)
    advantages[0, 2] = logprobs[1, 2] = value  # outside the mask nothing matters
    assert policy_loss(logprobs, advantages, correction).isfinite().all()
    advantages[0, 1] = value
    with pytest.raises(ValueError, match="policy_loss: an advantage is NaN or infinite"):
        policy_loss(logprobs, advantages, correction)
    logprobs[1, 1] = value
    with pytest.raises(ValueError, match="policy_loss: a logprob is NaN or infinite"):
        policy_loss(logprobs, torch.ones(2, 1), correction)


@pytest.mark.parametrize(
    "clips",
    [
        *({"dual_clip": value} for value in (0.5, -3.0, math.nan, None, "3")),
        *({"clip": value} for value in ((-0.1, 0.2), (0.2, -0.1), (math.nan, 0.2), 0.2, (0.2,))),
    ],
    ids=str,
)
@pytest.mark.parametrize("preset", ["decoupled_token_is", "bypass_pg_is"])
def test_clips_out_of_range(clips: Any, preset: str) -> None:
    (value,) = clips.values()
    with pytest.raises(ValueError, match=r"policy_loss: clip is .*dual_clip") as refused:
        policy_loss(drawn(2, 3), torch.ones(2, 1), corrected(2, 3, preset=preset), **clips)
    assert repr(value) in str(refused.value)


def test_clips_that_hold() -> None:
    given = drawn(2, 3), torch.ones(2, 1), corrected(2, 3)
    for clips in (
        {"clip": [0.2, 0.28]},
        {"clip": (0, math.inf)},
        {"dual_clip": 1},
        {"dual_clip": math.inf},
    ):
        assert policy_loss(*given, **clips).isfinite().all()  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool], ids=str)
def test_whole_numbers_as_advantages(dtype: torch.dtype) -> None:
    advantages, correction = torch.tensor([[1], [0]], dtype=dtype), corrected(2, 3)
    found = policy_loss(drawn(2, 3).float(), advantages, correction)
    assert torch.equal(found, policy_loss(drawn(2, 3).float(), advantages.float(), correction))


def one_above(logprobs: torch.Tensor) -> torch.Tensor:
    return logprobs.index_fill(1, torch.tensor([1]), 0.1)


COMPARED = correct_logprobs, mismatch_metrics, worst_tokens
DTYPE, KIND = (
    "logprobs_BT has dtype .*; pass it as float",
    "logprobs_BT is a (list|ndarray); pass a t",
)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        # probabilities, losses, and one value above 0 among others
        *((wrong, "logprob is .*above 0.01.*log_softmax") for wrong in (torch.exp, torch.neg)),
        (one_above, "logprob is .*above 0.01.*log_softmax"),
        *((convert, DTYPE) for convert in (torch.Tensor.int, torch.Tensor.cfloat)),
        *((convert, KIND) for convert in (torch.Tensor.tolist, torch.Tensor.numpy)),
    ],
)
def test_what_is_no_logprob(wrong: Callable[[torch.Tensor], Any], sentence: str) -> None:
    good, odd, mask = drawn(2, 3), wrong(drawn(2, 3)), ones(2, 3)
    for call in COMPARED[:2] if "above" in sentence else COMPARED:
        for both, whose in (((odd, good), "trainer"), ((good, odd), "rollout")):
            with pytest.raises(ValueError, match=f": (a )?{whose}[_ ]{sentence}"):
                call(*both, mask)
    with pytest.raises(ValueError, match=f"trainer[_ ]{sentence}"):
        correct(rollout_of(good.tolist()), odd)
    with pytest.raises(ValueError, match=f"policy_loss: (a )?{sentence}"):
        policy_loss(odd, torch.ones(2, 1), corrected(2, 3))


@pytest.mark.parametrize("convert", [torch.Tensor.tolist, torch.Tensor.numpy])
def test_masks_and_advantages_are_tensors(convert: Callable[[torch.Tensor], Any]) -> None:
    good = drawn(2, 3)
    for call in COMPARED:
        with pytest.raises(ValueError, match=r": mask_BT is a (list|ndarray); pass a torch"):
            call(good, good, convert(ones(2, 3)))
    with pytest.raises(ValueError, match="policy_loss: advantages_BT is a"):
        policy_loss(good, convert(torch.ones(2, 1)), corrected(2, 3))
    with pytest.raises(ValueError, match=r"versions_BT has dtype .*; pass it as int64"):
        correct_logprobs(good, good, ones(2, 3), versions_BT=good)


def test_a_certain_token_may_round_above_zero() -> None:
    almost = torch.full((2, 3), 1e-4)
    result = correct_logprobs(almost, almost, ones(2, 3))
    assert result.weights_BT.eq(1).all()
    assert policy_loss(almost, torch.ones(2, 1), result).eq(-1).all()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_correction_of_inference_mode_is_of_a_loss_with_gradients(preset: str) -> None:
    rollout, logits = (
        rollout_of(drawn(2, 3, seed=1).tolist()),
        torch.zeros(2, 3, requires_grad=True),
    )
    with torch.inference_mode():
        trainer = drawn(2, 3).float()
        assert rollout.mask_BT.all() and rollout.logprobs_BT.lt(0).all()
        correction = correct(rollout, trainer, preset)
    assert torch.equal(correction.weights_BT, correct(rollout, trainer.clone(), preset).weights_BT)
    policy_loss(logits + trainer.clone(), torch.ones(2, 1), correction).sum().backward()
    (logits * rollout.logprobs_BT)[rollout.mask_BT].sum().backward()  # both were first read there
    assert logits.grad is not None and logits.grad.isfinite().all()
