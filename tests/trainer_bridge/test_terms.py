"""Terms beside the policy's loss: tokens and gradients by hand, and the mean over a batch."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from trainer_bridge import policy_loss, reduce_tokens, reference_kl
from trainer_bridge.correction import Correction, correct_logprobs

ESTIMATORS = ("k1", "k2", "k3")
NAN = math.nan
MASK = [[1, 1, 1, 0, 0], [1, 0, 1, 1, 1], [0, 0, 0, 0, 0], [1, 1, 0, 0, 0]]
REDUCTIONS: list[dict[str, Any]] = [
    {"reduce": "tokens"},
    {"reduce": "sequences"},
    {"reduce": "constant", "max_tokens": 6},
]


def drawn(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return -3 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1e-3


def corrected() -> Correction:
    mask_BT = torch.tensor(MASK, dtype=torch.bool)
    return correct_logprobs(drawn(1, 4, 5), drawn(2, 4, 5), mask_BT, "decoupled_token_is")


def of_token(p: float, q: float, estimator: str) -> tuple[float, float]:
    """The estimate from the logprobs of policy and reference, and its derivative by p."""
    ratio = math.exp(q) / math.exp(p)
    if estimator == "k1":
        return p - q, 1.0
    if estimator == "k2":
        return (p - q) ** 2 / 2, p - q
    return ratio - 1 - math.log(ratio), 1 - ratio


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_each_token_and_its_gradient_by_hand(estimator: Any) -> None:
    mask_BT = torch.tensor(MASK, dtype=torch.bool)
    now_BT, reference_BT = (
        drawn(seed, 4, 5).masked_fill(~mask_BT, NAN).requires_grad_() for seed in (1, 2)
    )
    found_BT = reference_kl(now_BT, reference_BT, mask_BT, estimator)
    found_BT.sum().backward()
    assert now_BT.grad is not None and reference_BT.grad is None
    for b, t in np.ndindex(4, 5):
        value, slope = 0.0, 0.0
        if MASK[b][t]:
            value, slope = of_token(now_BT[b, t].item(), reference_BT[b, t].item(), estimator)
        assert found_BT[b, t].item() == pytest.approx(value, rel=1e-9, abs=1e-15)
        assert now_BT.grad[b, t].item() == pytest.approx(slope, rel=1e-9, abs=1e-15)
    half_BT = reference_kl(now_BT.bfloat16(), reference_BT.float(), mask_BT, estimator)
    assert half_BT.dtype == torch.float32
    same = reference_kl(now_BT, now_BT, mask_BT, estimator)
    assert not same.any()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_what_they_estimate(estimator: Any) -> None:
    """Over a whole vocabulary: the KL, and as a loss the gradient that the docstring says."""
    logits_V = drawn(3, 7).requires_grad_()
    policy_V, reference_V = logits_V.log_softmax(0), drawn(4, 7).log_softmax(0)
    ones_V1 = torch.ones(7, 1, dtype=torch.bool)
    found_V = reference_kl(policy_V[:, None], reference_V[:, None], ones_V1, estimator)[:, 0]
    probability_V = policy_V.detach().exp()
    forward = (policy_V.exp() * (policy_V - reference_V)).sum()
    backward = (reference_V.exp() * (reference_V - policy_V)).sum()
    if estimator != "k2":
        assert (probability_V @ found_V).item() == pytest.approx(forward.item(), rel=1e-12)
    wanted = {"k1": 0 * forward, "k2": forward, "k3": backward}[estimator]
    gradients = [
        torch.autograd.grad(each, logits_V, retain_graph=True)[0]
        for each in (probability_V @ found_V, wanted)
    ]
    torch.testing.assert_close(*gradients, atol=1e-14, rtol=0)
    if estimator != "k1":
        assert gradients[0].abs().max() > 1e-3


def test_far_references_are_bounded() -> None:
    """A ratio of e^700 stays finite, without a gradient that points away."""
    now = torch.tensor([[-700.0, 0.0]], requires_grad=True)
    found = reference_kl(now, torch.tensor([[0.0, -700.0]]), torch.ones(1, 2, dtype=torch.bool))
    found.sum().backward()
    assert found.tolist()[0] == pytest.approx([math.exp(20) - 21, math.exp(-20) + 19], rel=1e-6)
    assert now.grad is not None and not now.grad.any()


@pytest.mark.parametrize("kind", REDUCTIONS, ids=str)
def test_means_by_hand_in_any_micro_batches(kind: dict[str, Any]) -> None:
    correction, values_BT = corrected(), drawn(5, 4, 5)
    rows = [
        [v for v, m in zip(*both, strict=True) if m] for both in zip(values_BT, MASK, strict=True)
    ]
    sums = [math.fsum(map(float, row)) for row in rows if row]
    wanted = {
        "tokens": sum(sums) / sum(map(sum, MASK)),
        "sequences": sum(s / len(row) for s, row in zip(sums, filter(None, rows), strict=True)) / 3,
        "constant": sum(sums) / (3 * 6),
    }[kind["reduce"]]
    whole_BT = values_BT.masked_fill(~correction.mask_BT, NAN).requires_grad_()
    loss = reduce_tokens(whole_BT, correction, **kind)
    loss.backward()
    assert loss.item() == pytest.approx(wanted, rel=1e-12)
    cut_BT = whole_BT.detach().clone().requires_grad_()
    for begin, end in pairwise((0, 1, 1, 3, 4)):
        part = correction[begin:end]
        reduce_tokens(cut_BT[begin:end, : part.mask_BT.shape[1]], part, **kind).backward()
    assert whole_BT.grad is not None and torch.equal(cut_BT.grad, whole_BT.grad)  # type: ignore[arg-type]
    ranks = replace(correction, tokens=20, sequences=9, ranks=4)  # the mean of ranks' gradients
    parts = {"tokens": (sum(map(sum, MASK)), 20)}.get(kind["reduce"], (3, 9))
    again = reduce_tokens(whole_BT, ranks, **kind).item()
    assert again == pytest.approx(wanted * parts[0] / parts[1] * 4, rel=1e-12)


@pytest.mark.parametrize("kind", REDUCTIONS, ids=str)
def test_the_policys_loss_is_reduced_so(kind: dict[str, Any]) -> None:
    correction, now_BT = corrected(), drawn(6, 4, 5)
    losses_BT = policy_loss(now_BT, drawn(7, 4, 5), correction)
    found = policy_loss(now_BT, drawn(7, 4, 5), correction, **kind)
    assert torch.equal(found, reduce_tokens(losses_BT, correction, **kind))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c, x: reduce_tokens(x, c, "none"), "reduce is 'none'; pass one of tokens"),
        (lambda c, x: reduce_tokens(x, c, "constant"), "reduce is 'constant' and max_tokens None"),
        (lambda c, x: reduce_tokens(x, c, "tokens", max_tokens=3), "and max_tokens 3"),
        (lambda c, x: reduce_tokens(x, c, "constant", max_tokens=0), "max_tokens is 0"),
        (lambda c, x: reduce_tokens(x[:1], c, "tokens"), r"\(1, 5\).*correction\[rows\]"),
        (lambda c, x: reduce_tokens(x.long(), c, "tokens"), "dtype torch.int64"),
        (lambda c, x: reduce_tokens([1.0], c, "tokens"), "values_BT is a list"),
        (lambda c, x: reference_kl(x, x, c.mask_BT, "k4"), "estimator is 'k4'"),
        (lambda c, x: reference_kl(x, x[:1], c.mask_BT), "reference_BT.*same tokens"),
        (lambda c, x: reference_kl(x, x, c.mask_BT.long()), "mask_BT has dtype"),
        (lambda c, x: reference_kl(x + NAN, x, c.mask_BT), "a logprob is NaN"),
        (
            lambda c, x: reference_kl(x, x - math.inf, c.mask_BT),
            "reference's logprob is NaN or inf",
        ),
        (lambda c, x: reference_kl(x, -x, c.mask_BT), "reference's logprob is above 0.01"),
    ],
)
def test_what_is_no_term_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^(reduce_tokens|reference_kl): .*{message}"):
        call(corrected(), drawn(1, 4, 5))
