"""The demo's arithmetic by hand, its start, and that it learns; test_demo.py runs all of it."""

import math
import sys
from typing import Any

import pytest
import torch

from examples.grpo import __main__ as command_line
from examples.grpo import arithmetic, loop, tiny_model
from trainer_bridge import Rollout, response_logprobs
from trainer_bridge.engines.engine_client import EngineError

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
    torch.testing.assert_close(loop.group_advantages(rewards_PG), expected, atol=1e-5, rtol=0)


def test_a_response_without_a_reward_is_left_out() -> None:
    """It failed, or was cut short: advantages of the others are those of the group without it."""
    nan = float("nan")
    rewards_PG = torch.tensor([[1.0, nan, 0.0, 0.0, 0.0], [nan] * 5])
    found_PG = loop.group_advantages(rewards_PG)
    expected_PG = loop.group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    torch.testing.assert_close(found_PG[0, [0, 2, 3, 4]], expected_PG[0])
    assert found_PG[0, 1] == 0.0 and found_PG[1].tolist() == [0.0] * 5


@pytest.mark.usefixtures("one_rank")
def test_the_loss_has_no_response_that_was_cut_short() -> None:
    """Whatever its tokens are."""

    def learned(last: str) -> list[torch.Tensor]:
        model = tiny_model.build_model(seed=0)
        tiny_model.shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        batch = a_rollout([RIGHT, WRONG, last])
        batch.finish_reasons[2] = "abort"
        loop.learn(model, optimizer, batch, torch.tensor([[1.0, 0.0, float("nan")]]))
        return [parameter.detach().full_tensor() for parameter in model.parameters()]

    pairs = zip(learned("9\n"), learned("8,8,8,8,8"), strict=True)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in pairs)


def test_share_of_is_a_partition_in_order() -> None:
    batch = a_rollout([RIGHT, WRONG, RIGHT, "9\n"])
    lost = EngineError("too long", 400)
    batch.errors[2] = lost
    shares = [loop.share_of(rank, 2, batch) for rank in range(2)]
    assert [share.errors for share in shares] == [{}, {0: lost}]
    assert [share.tokens for share in shares] == [batch.tokens[:2], batch.tokens[2:]]
    assert [share.logprobs for share in shares] == [batch.logprobs[:2], batch.logprobs[2:]]
    assert shares[1].tokens_BT.shape == (2, len(RIGHT))
    assert shares[1].temperature == batch.temperature


@pytest.mark.usefixtures("one_rank")
def test_learning_raises_the_probability_of_what_was_rewarded() -> None:
    model = tiny_model.build_model(seed=0)
    tiny_model.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = a_rollout([RIGHT, WRONG])

    def likelihoods() -> list[float]:
        with torch.no_grad():
            logprobs_BT = response_logprobs(model, batch.prompt_tokens, batch.tokens)
        return (logprobs_BT * batch.mask_BT).sum(1).tolist()

    before = likelihoods()
    metrics = loop.learn(model, optimizer, batch, torch.tensor([[1.0, 0.0]]))
    after = likelihoods()
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert metrics["tokens"] == len(RIGHT) + len(WRONG)
    # The mismatch is measured against the rollout's log 1/2, before the step.
    assert metrics["mismatch_kl_k1"] == pytest.approx(
        math.log(0.5) - sum(before) / metrics["tokens"], abs=0.05
    )


def started(
    monkeypatch: pytest.MonkeyPatch, *options: str, gpus: int, world: int | None = None
) -> tuple[int, loop.Config]:
    """Ranks and options of what ``main`` starts; with ``world``, under torchrun."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(sys, "argv", ["grpo", *options])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    for name, value in {"WORLD_SIZE": world, "RANK": world and 0}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(command_line, "run", lambda rank, *rest: calls.append(rest))
    monkeypatch.setattr(command_line, "spawn", lambda run, args, nprocs: calls.append(args))
    command_line.main()
    [(ranks, _, config)] = calls
    return ranks, config


@pytest.mark.parametrize(
    ("gpus", "ranks", "size"), [(0, 2, "tiny"), (1, 1, "small"), (4, 1, "small")]
)
def test_device_decides_ranks_and_size(
    monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int, size: str
) -> None:
    found, config = started(monkeypatch, gpus=gpus)
    assert (found, config.size, config.engine_args) == (ranks, size, {})
    options = "--size", "tiny", "--engine-args", '{"page_size": 16}'
    _, config = started(monkeypatch, *options, gpus=gpus)
    assert (config.size, config.engine_args) == ("tiny", {"page_size": 16})


def test_torchrun_takes_one_rank_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert started(monkeypatch, gpus=2, world=2)[0] == 2
    with pytest.raises(SystemExit):
        started(monkeypatch, gpus=2, world=4)
    assert "4 ranks need a GPU each" in capsys.readouterr().err
    assert started(monkeypatch, gpus=0, world=4)[0] == 4


def test_prompts_that_ranks_cannot_share_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        started(monkeypatch, "--prompts", "3", gpus=0)
