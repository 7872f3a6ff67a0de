"""The loss by hand, how a batch is shared and scored, and where the ranks and the engine run."""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from examples.grpo import arithmetic, placement
from examples.grpo import loop as grpo
from trainer_bridge import Rollout, response_logprobs

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
    from examples.grpo import tiny_model

    model = tiny_model.build_model(seed=0)
    tiny_model.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = a_rollout([RIGHT, WRONG])

    def likelihoods() -> list[float]:
        with torch.no_grad():
            logprobs_BT = response_logprobs(model, batch.prompt_tokens, batch.tokens)
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


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Make torch find so many GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def arguments_of(
    monkeypatch: pytest.MonkeyPatch, *options: str, world: int | None = None
) -> argparse.Namespace:
    """What ``main`` hands to its ranks; with ``world``, under torchrun."""
    started: list[tuple[Any, ...]] = []
    monkeypatch.setattr(sys, "argv", ["grpo.py", *options])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONWARNINGS", "default")
    for name, value in {"WORLD_SIZE": world, "RANK": world and 0}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(grpo, "work", lambda rank, *rest: started.append(rest))
    monkeypatch.setattr(grpo, "spawn", lambda work, args, nprocs: started.append(args))
    grpo.main()
    [(ranks, _, args)] = started
    return argparse.Namespace(ranks=ranks, **vars(args))


@pytest.mark.parametrize(
    ("count", "ranks", "size"), [(0, 2, "tiny"), (1, 1, "small"), (4, 1, "small")]
)
def test_device_decides_ranks_and_size(
    monkeypatch: pytest.MonkeyPatch, count: int, ranks: int, size: str
) -> None:
    gpus(monkeypatch, count)
    args = arguments_of(monkeypatch)
    assert (args.ranks, args.size, args.engine_args) == (ranks, size, {})
    args = arguments_of(monkeypatch, "--size", "tiny", "--engine-args", '{"page_size": 16}')
    assert (args.size, args.engine_args) == ("tiny", {"page_size": 16})


def test_torchrun_takes_one_rank_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(monkeypatch, 2)
    assert arguments_of(monkeypatch, world=2).ranks == 2
    with pytest.raises(SystemExit):
        arguments_of(monkeypatch, world=4)
    assert "4 ranks need 4 GPUs" in capsys.readouterr().err
    gpus(monkeypatch, 0)
    assert arguments_of(monkeypatch, world=4).ranks == 4


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("page_size=16", "is not JSON"),
        ("[1]", "is no object"),
        ('{"quantization": "fp8", "page_size": 16}', "quantization: the demo sets this itself"),
    ],
)
def test_engine_args_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    with pytest.raises(SystemExit):
        arguments_of(monkeypatch, "--engine-args", text)
    assert reason in capsys.readouterr().err


def test_engine_keywords(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "find_spec", lambda name: None)
    gpu = placement.engine_keywords("cuda", {})
    assert gpu["mem_fraction_static"] < 0.5
    assert "attention_backend" not in gpu
    monkeypatch.setattr(placement, "find_spec", lambda name: name == "flashinfer")
    assert placement.engine_keywords("cuda", {}) == gpu | {"attention_backend": "flashinfer"}
    assert "attention_backend" not in placement.engine_keywords("cpu", {})
    # What the user says holds, and is not kept for the next engine.
    mine = {"attention_backend": "triton", "max_total_tokens": 1024, "page_size": 16}
    assert mine.items() <= placement.engine_keywords("cuda", mine).items()
    assert placement.engine_keywords("cuda", {})["max_total_tokens"] == gpu["max_total_tokens"]


def test_join_takes_the_backends_of_the_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    groups: list[tuple[str, int, int]] = []
    chosen: list[torch.device] = []
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda backend, init_method, rank, world_size: groups.append((backend, rank, world_size)),
    )
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    gpus(monkeypatch, 0)
    assert placement.join(1, 2, "env://") == torch.device("cpu")
    gpus(monkeypatch, 2)
    assert placement.join(1, 2, "env://") == torch.device("cuda:1")
    assert groups == [("gloo", 1, 2), ("cpu:gloo,cuda:nccl", 1, 2)]
    assert chosen == [torch.device("cuda:1")]
