"""Weights, rejections and losses against NumPy loops that share no code with them."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer_bridge.correction_oracle import (
    Rows,
    batches,
    keep,
    log_ratios,
    mask_of,
    pad,
    rollout_of,
    weigh,
)
from trainer_bridge import Correction, correct, mismatch_metrics
from trainer_bridge.correction import PRESETS, CorrectionConfig, correct_logprobs, policy_loss
from trainer_bridge.correction.config import LEVELS, REJECTIONS
from trainer_bridge.metrics import mismatch as mismatch_module

REL = 1e-13  # float64 sums in another order; healthy below 1e-14
FLOAT32_REL = 2e-7  # float32 weights, over a float32 mean: three roundings of 2^-24

bounds = st.sampled_from([0.25, 0.5, 0.9, 0.99])
pairs = st.tuples(bounds, bounds.map(lambda low: 1 / low))


@st.composite
def configs(draw: Any) -> CorrectionConfig:
    options = draw(st.lists(st.sampled_from(REJECTIONS), max_size=3, unique=True))
    upper = st.sampled_from([1e-3, 0.03, 0.4, 3.0])
    rejections = {
        option: draw(pairs | st.just(1.25) if option.endswith("k1") else upper)
        for option in options
    }
    return CorrectionConfig(
        rollout_is=draw(st.sampled_from([None, *LEVELS])),
        rollout_is_threshold=draw(pairs | st.sampled_from([1.05, 2.0, 5.0])),
        rollout_is_batch_normalize=draw(st.booleans()),
        rollout_rs=rejections,
        veto_threshold=draw(st.sampled_from([None, 1e-4, 0.8])),
    )


def near_a_bound(x: list[np.ndarray], config: CorrectionConfig) -> bool:
    """Whether rounding may decide: then both answers are right."""
    thresholds = [config.rollout_is_threshold, *config.rollout_rs.values(), config.veto_threshold]
    numbers = np.hstack([threshold for threshold in thresholds if threshold is not None])
    edges = [*numbers, *np.abs(np.log(numbers))]
    for row in x:
        v = np.clip(row, -20, 20)
        values = [v, v * v / 2, np.expm1(v) - v]
        seen = np.concatenate(
            [*values, *([f(each)] for each in values for f in (sum, max) if len(v))]
        )
        seen = np.concatenate(
            [seen, seen / max(len(v), 1), [row.sum(), row.mean() if len(v) else 0]]
        )
        if any(np.isclose(np.abs(seen), edge, rtol=1e-9, atol=0).any() for edge in edges):
            return True
    return False


@given(batches(), configs())
@settings(max_examples=400, deadline=None)
def test_corrections_agree_with_the_oracle(
    batch: tuple[Rows, Rows], config: CorrectionConfig
) -> None:
    trainer, rollout = batch
    x = log_ratios(trainer, rollout)
    if near_a_bound(x, config):
        return
    result = correct_logprobs(pad(trainer), pad(rollout), mask_of(rollout), config)
    kept = keep(x, dict(config.rollout_rs), config.veto_threshold)
    ones = [np.ones(len(row)) for row in x]
    level, threshold = config.rollout_is, config.rollout_is_threshold
    raw = ones if level is None else weigh(x, level, threshold, False)
    final = ones
    if level is not None:
        final = weigh(x, level, threshold, config.rollout_is_batch_normalize)
    expected = pad([row * passes for row, passes in zip(final, kept, strict=True)])
    torch.testing.assert_close(result.weights_BT, expected, rtol=FLOAT32_REL, atol=0)
    assert torch.equal(result.mask_BT, pad(kept, False, torch.bool))
    assert not result.weights_BT[~result.mask_BT].any()

    metrics, tokens = result.metrics, sum(map(len, x))
    flat, passes = np.concatenate(raw), np.concatenate(kept)
    if level is not None:
        squares = (flat**2).sum()
        of_weights = {"mean": flat.mean(), "min": flat.min(), "max": flat.max()}
        of_weights["ess"] = flat.sum() ** 2 / (tokens * squares) if squares else 0.0
        for name, value in of_weights.items():
            assert metrics[f"weight_{name}"] == pytest.approx(value, rel=REL, abs=0)
        limit = 0 if isinstance(threshold, tuple) else threshold
        assert metrics["clipped_fraction"] == pytest.approx((flat == limit).mean())
    if config.rollout_rs or config.veto_threshold is not None:
        assert metrics["masked_fraction"] == pytest.approx(1 - passes.mean())
        whole = [row.all() for row in kept if len(row)]
        assert metrics["masked_sequence_fraction"] == pytest.approx(1 - np.mean(whole))
    plain = mismatch_metrics(pad(trainer), pad(rollout), mask_of(rollout))
    assert plain.items() <= metrics.items()


def test_a_rollout_is_corrected_by_token_tis_unless_told_otherwise() -> None:
    rows = [[-1.0, -2.0, -3.0], [-0.5]]
    versions = [[0, 0, 1], [1]]
    trainer_BT = torch.tensor([[-0.5, -2.0, -1.0], [-0.75, math.nan, math.nan]])
    result = correct(rollout_of(rows, versions), trainer_BT)
    expected = [[math.exp(0.5), 1.0, 2.0], [math.exp(-0.25), 0.0, 0.0]]
    torch.testing.assert_close(result.weights_BT, torch.tensor(expected))
    assert result.mask_BT.tolist() == [[True] * 3, [True, False, False]]
    assert result.metrics["clipped_fraction"] == 0.25
    assert result.metrics["version_1/clipped_fraction"] == 0.5
    assert result.metrics["version_0/tokens"] == 2
    same = correct(rollout_of(rows), trainer_BT, PRESETS["decoupled_token_is"])
    assert torch.equal(same.weights_BT, result.weights_BT)


def test_one_catastrophic_token_vetoes_its_sequence() -> None:
    mask_BT = torch.tensor([[True, True, False], [True, True, True]])
    trainer_BT = torch.tensor([[-1.0, 0.0, -99.0], [0.0, -10.0, 0.0]])
    config = CorrectionConfig(veto_threshold=1e-4)
    result = correct_logprobs(trainer_BT, torch.zeros(2, 3), mask_BT, config)
    assert result.mask_BT.tolist() == [[True, True, False], [False] * 3]
    assert result.metrics["veto/masked_sequence_fraction"] == 0.5
    assert result.metrics["veto/masked_fraction"] == 0.6
    looser = replace(config, veto_threshold=1e-5)  # control: e^-10 is 4.5e-5
    assert correct_logprobs(trainer_BT, torch.zeros(2, 3), mask_BT, looser).mask_BT[1].all()


def test_blocks_of_rows_are_normalised_together(monkeypatch: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    rollout_BT = -5 - torch.rand(9, 20, generator=generator)
    trainer_BT = rollout_BT + torch.randn(9, 20, generator=generator)
    given_ = trainer_BT, rollout_BT, torch.rand(9, 20, generator=generator) < 0.7
    versions_BT = torch.arange(9)[:, None].expand(9, 20) // 3
    for level in LEVELS:
        config = CorrectionConfig(level, 3.0, True, {"seq_mean_k3": 0.4}, 0.05)
        at_once = correct_logprobs(*given_, config, versions_BT=versions_BT)
        with monkeypatch.context() as patch:
            patch.setattr(mismatch_module, "CPU_TOKENS", 45)
            found = correct_logprobs(*given_, config, versions_BT=versions_BT)
        torch.testing.assert_close(found.weights_BT, at_once.weights_BT, rtol=1e-6, atol=0)
        assert torch.equal(found.mask_BT, at_once.mask_BT)
        assert found.metrics == pytest.approx(at_once.metrics, rel=REL, abs=REL)
        assert found.metrics["weight_batch_mean"] != 1.0


def loss_case() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    rollout_BT, noise_BT, step_BT, advantages_BT = torch.randn(
        4, 3, 5, generator=generator
    ).double()
    rollout_BT -= 5
    mask_BT = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 1, 1, 1], [1, 1, 0, 0, 0]], dtype=torch.bool)
    trainer_BT = rollout_BT + 0.3 * noise_BT
    return trainer_BT, rollout_BT, mask_BT, trainer_BT + 0.3 * step_BT, advantages_BT


@pytest.mark.parametrize("name", PRESETS)
def test_losses_and_gradients(name: str) -> None:
    """Against the formulas, token by token; pi_old and weights are as the mode says."""
    trainer_BT, rollout_BT, mask_BT, current_BT, advantages_BT = loss_case()
    config = PRESETS[name]
    seen_BT = current_BT if config.bypass_mode else trainer_BT
    correction = correct_logprobs(seen_BT, rollout_BT, mask_BT, config)
    old_BT = rollout_BT if config.bypass_mode else trainer_BT
    logprobs_BT = current_BT.masked_fill(~mask_BT, math.nan).requires_grad_()
    losses_BT = policy_loss(logprobs_BT, advantages_BT, correction, clip=(0.2, 0.3), dual_clip=2.0)
    (gradient_BT,) = torch.autograd.grad(losses_BT.sum(), logprobs_BT)
    reinforce = config.bypass_mode and config.loss_type == "reinforce"
    applied = not (config.bypass_mode and not reinforce)
    for b, t in np.ndindex(3, 5):
        loss, slope = 0.0, 0.0
        if correction.mask_BT[b, t]:
            a, weight = advantages_BT[b, t].item(), correction.weights_BT[b, t].item()
            assert applied or weight == 1.0
            if reinforce:
                loss, slope = -weight * a * current_BT[b, t].item(), -weight * a
            else:
                rho = math.exp(current_BT[b, t].item() - old_BT[b, t].item())
                free, clipped = -a * rho, -a * min(max(rho, 0.8), 1.3)
                loss = max(free, clipped)
                slope = -a * rho if loss == free else 0.0
                if a < 0 and loss > -2 * a:
                    loss, slope = -2 * a, 0.0
                loss, slope = weight * loss, weight * slope
        assert losses_BT[b, t].item() == pytest.approx(loss, rel=1e-6, abs=1e-12)
        assert gradient_BT[b, t].item() == pytest.approx(slope, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["decoupled_token_is", "bypass_pg_is"])
def test_losses_of_half_precision_logprobs_are_fp32(name: str, dtype: torch.dtype) -> None:
    trainer_BT, rollout_BT, mask_BT, current_BT, advantages_BT = loss_case()
    half_BT, advantages_BT = current_BT.to(dtype).requires_grad_(), advantages_BT.to(dtype)
    correction = correct_logprobs(trainer_BT, rollout_BT, mask_BT, PRESETS[name])
    losses_BT = policy_loss(half_BT, advantages_BT, correction)
    assert losses_BT.dtype == torch.float32
    wide_BT = half_BT.detach().float()
    assert torch.equal(losses_BT, policy_loss(wide_BT, advantages_BT.float(), correction))
    losses_BT.sum().backward()
    assert half_BT.grad is not None and half_BT.grad.dtype == dtype


def test_weights_carry_no_gradient_and_take_half_precision_logprobs() -> None:
    trainer = torch.tensor([[-1.0, -2.5]], requires_grad=True)
    result = correct(rollout_of([[-1.5, -2.0]]), trainer)
    assert not result.weights_BT.requires_grad and not result.old_logprobs_BT.requires_grad
    half = correct(rollout_of([[-1.5, -2.0]]), trainer.detach().bfloat16())
    assert torch.equal(half.weights_BT, result.weights_BT)


@given(batches(), st.sampled_from([*PRESETS]))
@settings(max_examples=50, deadline=None)
def test_identical_logprobs_need_no_correction(batch: tuple[Rows, Rows], name: str) -> None:
    _, rows = batch
    result = correct(rollout_of(rows), pad(rows), name)
    assert torch.equal(result.weights_BT, mask_of(rows).float())
    zero = "mismatch_kl_k1 mismatch_kl_k3 chi2_token chi2_seq log_ppl_gap logprob_abs_diff_max"
    assert {result.metrics[name] for name in zero.split()} == {0.0}
    one = "ess ratio_min ratio_mean ratio_max ratio_p50 ppl_ratio token_mult_prob_error"
    assert {result.metrics[name] for name in one.split()} == {1.0}


def test_thresholds_may_be_lists() -> None:
    """As YAML and JSON have them."""
    given = CorrectionConfig("token", [0.5, 5.0], rollout_rs={"seq_sum_k1": [0.5, 2.0]})  # type: ignore[arg-type,dict-item]
    assert given == CorrectionConfig("token", (0.5, 5.0), rollout_rs={"seq_sum_k1": (0.5, 2.0)})
    assert CorrectionConfig("token", np.float64(2.0)) == CorrectionConfig("token", 2.0)
    assert given.rejection_bounds == {"seq_sum_k1": (math.log(0.5), math.log(2.0))}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_is": "sequences"}, "rollout_is .*'sequences'.*token"),
        ({"rollout_is_threshold": 0.0}, r"rollout_is_threshold .*0\.0.*positive"),
        ({"rollout_is_threshold": (2.0, 0.5)}, "rollout_is_threshold .*ascending"),
        ({"rollout_is_threshold": math.inf}, "rollout_is_threshold .*finite"),
        ({"rollout_is_threshold": None}, "rollout_is_threshold .*None"),
        ({"rollout_is_threshold": "2.0"}, "rollout_is_threshold .*positive"),
        ({"rollout_is_threshold": [1.0, 2.0, 3.0]}, "rollout_is_threshold .*two"),
        ({"rollout_is_threshold": [2.0]}, "rollout_is_threshold .*two"),
        ({"rollout_rs": {"seq_sum_k1": [2.0]}}, "seq_sum_k1.*two"),
        ({"rollout_rs": {"geo": 1.0}}, "rollout_rs .*geo"),
        ({"rollout_rs": {"seq_max_k2": (0.5, 2.0)}}, "seq_max_k2.*one "),
        ({"veto_threshold": 2.0}, "veto_threshold .*2.0"),
        ({"loss_type": "gspo"}, "loss_type .*gspo"),
    ],
)
def test_a_config_that_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CorrectionConfig(**options)


def test_configs_in_verls_writing() -> None:
    read = CorrectionConfig.from_verl
    assert read({}) == CorrectionConfig("sequence")
    assert read({"rollout_is_threshold": "0.5_5.0"}).rollout_is_threshold == (0.5, 5.0)
    many = {"rollout_rs": "token_k1, seq_mean_k3,token_k1", "rollout_rs_threshold": "0.5_2,0.01"}
    assert read(many).rollout_rs == {"token_k1": (0.5, 2.0), "seq_mean_k3": 0.01}
    one = {"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": 1.5}
    assert read(one).rollout_rs == {"token_k1": 1.5, "token_k2": 1.5}
    for options in (
        {"rollout_rs": "token_k1"},
        {"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "1,2,3"},
        {"rollout_is_threshold": "two"},
        {"rollout_token_veto_threshold": 1e-4},
    ):
        with pytest.raises(ValueError, match="CorrectionConfig: "):
            read(options)


def test_other_unusable_inputs_are_refused() -> None:
    sampled = rollout_of([[-1.0, -2.0]])
    with pytest.raises(ValueError, match=r"'tis'.*CorrectionConfig.*decoupled_token_is"):
        correct(sampled, torch.zeros(1, 2), "tis")
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(1, 2\)"):
        correct(sampled, torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"1 sequences .*finite"):
        correct(sampled, torch.tensor([[math.nan, -1.0]]), "decoupled_geo_rs_seq_tis")
    everything = CorrectionConfig(
        rollout_rs=dict.fromkeys(REJECTIONS, 1.5),
        veto_threshold=0.5,
        rollout_is_batch_normalize=True,
    )
    for rows in ([[], []], []):
        with pytest.raises(ValueError, match="mask_BT"):
            correct_logprobs(pad(rows), pad(rows), mask_of(rows), everything)


# -- inputs: right row by row, or refused in a sentence

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
}


@pytest.mark.parametrize("name", CALLS)
@given(shapes(4))
@settings(max_examples=150, deadline=None)
def test_logprobs_are_compared_with_those_of_their_row_or_refused(
    name: str, case: tuple[Shape, list[Shape]]
) -> None:
    _, (of_trainer, of_rollout, of_mask, of_versions) = case
    trainer, rollout, mask = drawn(*of_trainer), drawn(*of_rollout, seed=1), ones(*of_mask)
    seen = {of_trainer, of_rollout, of_mask, of_versions}
    versions = torch.zeros(of_versions, dtype=torch.int64)
    if len(seen) > 1 or len(of_trainer) != 2:
        with pytest.raises(ValueError, match=f"{name}: .*shape"):
            CALLS[name](trainer, rollout, mask, versions=versions)
        return
    found = CALLS[name](trainer, rollout, mask, versions=versions)
    x = trainer - rollout
    if name == "correct":
        torch.testing.assert_close(found.weights_BT, x.float().exp().clamp(max=2.0))
    else:
        assert found["mismatch_kl_k1"] == pytest.approx(-x.mean().item(), abs=1e-12)


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


@pytest.mark.parametrize(
    "clips",
    [{"clip": [0.2, 0.28]}, {"clip": (0, math.inf)}, {"dual_clip": 1}, {"dual_clip": math.inf}],
    ids=str,
)
def test_clips_that_hold(clips: Any) -> None:
    losses = policy_loss(drawn(2, 3), torch.ones(2, 1), corrected(2, 3), **clips)
    assert losses.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.bool], ids=str)
def test_whole_numbers_as_advantages(dtype: torch.dtype) -> None:
    advantages, correction = torch.tensor([[1], [0]], dtype=dtype), corrected(2, 3)
    found = policy_loss(drawn(2, 3).float(), advantages, correction)
    assert torch.equal(found, policy_loss(drawn(2, 3).float(), advantages.float(), correction))


def one_above(logprobs: torch.Tensor) -> torch.Tensor:
    return logprobs.index_fill(1, torch.tensor([1]), 0.1)


COMPARED = correct_logprobs, mismatch_metrics
DTYPE = "logprobs_BT has dtype .*; pass it as float"
KIND = "logprobs_BT is a (list|ndarray); pass a t"


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
    for call in COMPARED:
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
    rollout = rollout_of(drawn(2, 3, seed=1).tolist())
    logits = torch.zeros(2, 3, requires_grad=True)
    with torch.inference_mode():
        trainer = drawn(2, 3).float()
        assert rollout.mask_BT.all() and rollout.logprobs_BT.lt(0).all()
        correction = correct(rollout, trainer, preset)
    assert torch.equal(correction.weights_BT, correct(rollout, trainer.clone(), preset).weights_BT)
    policy_loss(logits + trainer.clone(), torch.ones(2, 1), correction).sum().backward()
    (logits * rollout.logprobs_BT)[rollout.mask_BT].sum().backward()  # both were first read there
    assert logits.grad is not None and logits.grad.isfinite().all()
