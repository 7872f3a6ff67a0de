"""The demo's parts: its losses by hand, its start, its task, and a model that learns; test_demo.py
runs all of it."""

import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Qwen3ForCausalLM

from examples.grpo import __main__ as command_line
from examples.grpo import arithmetic, loop, tiny_model
from examples.grpo.arithmetic import Problem, demonstrate, encode, make_problem, reward
from tests.trainer_bridge import ranks
from trainer_bridge import Rollout, response_logprobs

RIGHT, WRONG = "8,6,10,9\n", "8,10,14,13\n"
SUM = Problem((3, 5, -2, 4, -1))


def a_rollout(responses: list[str]) -> Rollout:
    """A rollout of SUM at version 3, each token of probability 1/2."""
    tokens = [encode(response) for response in responses]
    return Rollout(
        prompt_tokens=[encode(SUM.prompt)] * len(tokens),
        tokens=tokens,
        logprobs=[[math.log(0.5)] * len(row) for row in tokens],
        versions=[[3] * len(row) for row in tokens],
        finish_reasons=["stop"] * len(tokens),
        temperature=1.0,
        groups=[0] * len(tokens),
    )


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


# -- the task

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


def test_problems_repeat_by_seed_and_responses_are_scored_by_problem() -> None:
    problems = arithmetic.draw_problems(8, "0 step 3")
    assert arithmetic.draw_problems(8, "0 step 3") == problems
    assert arithmetic.draw_problems(8, "0 step 4") != problems
    other = Problem((1, 1, 1, 1, 9))  # for which 13 is right
    responses = [encode(text) for text in ("8,6,10,9\n", "8,10,14,13\n") * 2]
    assert arithmetic.score([SUM, other], responses) == [1.0, 0.0, 0.0, 1.0]


# -- the model

STEPS = 6
COLLECTIVE_TIMEOUT_S = 30.0


@pytest.mark.parametrize("size", tiny_model.SIZES)
def test_dimensions_suit_block_fp8(size: str) -> None:
    with torch.device("meta"):
        model = tiny_model.build_model(seed=0, size=size)
    for name, weight in model.named_parameters():
        if "_proj" in name:
            assert all(size % 128 == 0 for size in weight.shape), name


@pytest.mark.usefixtures("one_rank")
def test_pretraining_learns_and_repeats_by_seed(tmp_path: Path) -> None:
    def train(seed: int) -> tuple[Qwen3ForCausalLM, list[float]]:
        model = tiny_model.build_model(seed)
        tiny_model.shard(model)
        return model, [loss for _, loss in tiny_model.pretrain(model, seed, STEPS)]

    (model, losses), (_, again), (_, other) = train(0), train(0), train(1)
    assert losses == again
    assert losses != other
    assert losses[-1] < losses[0] - 0.5  # 5.06 to 3.05 was measured

    tiny_model.save_checkpoint(model, tmp_path)
    saved = Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert saved.dtype == torch.bfloat16
    assert saved.config.eos_token_id == arithmetic.END_TOKEN
    for name, weight in saved.named_parameters():
        master = model.get_parameter(name).full_tensor()
        assert master.dtype == torch.float32
        assert torch.equal(weight, master.to(torch.bfloat16)), name


def _two_ranks(rank: int, folder: Path) -> None:
    """The gradient of unevenly shared tokens is that of their common mean."""
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    fully_shard(layer)
    x_BT = [torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[10.0, 99.0, 99.0]])][rank]
    mask_BT = torch.tensor([[True, True, True], [True, False, False]])[[rank]]
    loss = tiny_model.global_mean(layer(x_BT[..., None])[..., 0], mask_BT)
    loss.backward()
    gradient = layer.weight.grad
    assert isinstance(gradient, DTensor)
    # A mean of the ranks' means would be 6.
    assert gradient.full_tensor().item() == (1 + 2 + 3 + 10) / 4


@pytest.mark.timeout(ranks.JOIN_S + 30)
def test_global_mean_weighs_tokens_the_same_on_uneven_ranks(tmp_path: Path) -> None:
    ranks.run(_two_ranks, tmp_path, 2, COLLECTIVE_TIMEOUT_S)
