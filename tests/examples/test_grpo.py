"""The loss against numbers worked out by hand, and how a batch is shared and scored."""

import math

import arithmetic
import grpo
import pytest
import torch

from trainer_bridge import Rollout

RIGHT, WRONG = "8,6,10,9\n", "8,10,14,13\n"
SUM = arithmetic.Problem((3, 5, -2, 4, -1))


def a_rollout(responses: list[str]) -> Rollout:
    """A rollout of SUM at version 3, each token of probability 1/2."""
    tokens = [arithmetic.encode(response) for response in responses]
    return Rollout(
        prompt_tokens=[arithmetic.encode(SUM.prompt)] * len(tokens),
        tokens=tokens,
        logprobs=[[math.log(0.5)] * len(row) for row in tokens],
        versions=[[3] * len(row) for row in tokens],
        finish_reasons=["stop"] * len(tokens),
        temperature=1.0,
    )


def test_advantages_by_hand() -> None:
    # Group 0: mean 0.25, std sqrt(3)/4, so (1 - 0.25) / std = sqrt(3). Group 1: nothing to learn.
    rewards_PG = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    third = -1 / math.sqrt(3)
    expected = torch.tensor([[math.sqrt(3), third, third, third], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(grpo.group_advantages(rewards_PG), expected, atol=1e-5, rtol=0)


def test_policy_gradient_by_hand() -> None:
    logits_BTV = torch.tensor([[[0.0, 0.0], [0.0, math.log(3)]]], requires_grad=True)
    logprobs_BT = logits_BTV.log_softmax(-1)[..., 1]  # log 1/2, log 3/4
    weights_BT = torch.tensor([[1.0, 0.5]])
    losses_BT = grpo.policy_gradient(logprobs_BT, torch.tensor([2.0]), weights_BT)
    torch.testing.assert_close(losses_BT, torch.tensor([[2 * math.log(2), math.log(4 / 3)]]))
    losses_BT.sum().backward()
    # d(-w A log p) / d(logit of the sampled token) = -w A (1 - p): -2 / 2, -1 / 4
    expected = torch.tensor([[[1.0, -1.0], [0.25, -0.25]]])
    torch.testing.assert_close(logits_BTV.grad, expected)


def test_share_of_is_a_partition_in_order() -> None:
    batch = a_rollout([RIGHT, WRONG, RIGHT, "9\n"])
    shares = [grpo.share_of(rank, 2, batch) for rank in range(2)]
    assert [share.tokens for share in shares] == [batch.tokens[:2], batch.tokens[2:]]
    assert [share.logprobs for share in shares] == [batch.logprobs[:2], batch.logprobs[2:]]
    assert shares[1].tokens_BT.shape == (2, len(RIGHT))
    assert shares[1].temperature == batch.temperature


def test_score_goes_by_problem() -> None:
    other = arithmetic.Problem((1, 1, 1, 1, 9))
    batch = a_rollout([RIGHT, WRONG, RIGHT, WRONG])
    assert grpo.score([SUM, other], batch) == [1.0, 0.0, 0.0, 1.0]  # 13 is right for the other


def test_problems_repeat_by_seed() -> None:
    problems, prompts = grpo.draw_problems(8, "0 step 3")
    assert grpo.draw_problems(8, "0 step 3") == (problems, prompts)
    assert grpo.draw_problems(8, "0 step 4")[0] != problems
    assert [arithmetic.decode(prompt) for prompt in prompts] == [p.prompt for p in problems]


@pytest.mark.usefixtures("one_rank")
def test_learning_raises_the_probability_of_what_was_rewarded() -> None:
    import tiny_model

    model = tiny_model.build_model(seed=0)
    tiny_model.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = a_rollout([RIGHT, WRONG])

    def likelihoods() -> list[float]:
        with torch.no_grad():
            logprobs_BT = tiny_model.response_logprobs(model, batch.prompt_tokens, batch.tokens)
        return (logprobs_BT * batch.mask_BT).sum(1).tolist()

    before = likelihoods()
    metrics = grpo.learn(model, optimizer, batch, torch.tensor([[1.0, 0.0]]))
    after = likelihoods()
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert metrics["tokens"] == len(RIGHT) + len(WRONG)
    # The mismatch is measured against the rollout's log 1/2, before the step.
    assert metrics["mismatch_kl_k1"] == pytest.approx(
        math.log(0.5) - sum(before) / metrics["tokens"], abs=0.05
    )
