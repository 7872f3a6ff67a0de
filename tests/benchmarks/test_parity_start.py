"""The models of the study, and the weights that its runs begin with."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.parity import models, planting, start, tasks
from benchmarks.parity.learner import Learner
from benchmarks.parity.settings import OF_STUDY, SIZES, Study
from benchmarks.parity.tasks import Problem
from examples.grpo import arithmetic, tiny_model
from examples.grpo.arithmetic import END
from trainer_bridge import KVCalibrator, response_logprobs
from trainer_bridge.fp8_forward import convert_layers

CPU = torch.device("cpu")
SMALL = replace(SIZES["tiny"], demonstrations=3, demonstration_batch=4)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_planting_changes_k_but_not_the_policy() -> None:
    model = models.build("dense", "tiny", 0).to(torch.bfloat16)
    tokens = torch.randint(128, (2, 40), generator=torch.Generator().manual_seed(0))

    def look() -> tuple[torch.Tensor, torch.Tensor]:
        calibrator = KVCalibrator.of(model, margin=448)  # scales are magnitudes, rounded up
        with torch.no_grad(), calibrator.watch(model):
            logits = model(tokens, use_cache=False).logits
        return logits, calibrator.scales()[:, 0].amin()

    before, amax = look()
    gains = planting.kv_outliers(model)
    Learner(model, 1e-3).plant(gains)
    after, planted = look()
    assert torch.equal(before, after)
    assert amax < 20 < 448 < planted
    assert len(gains) == 2 * model.config.num_hidden_layers


def test_an_alias_has_what_the_learner_writes(tmp_path: Path) -> None:
    """Also where the learner's model computes in FP8, is planted and goes on from a checkpoint."""
    models.save(models.build("dense", "tiny", 0), tmp_path)
    model = models.load(tmp_path, CPU)
    learner = Learner(model, 1e-2)
    other = models.alias(model, tmp_path)
    names = {name for name, _ in model.named_parameters() if name.endswith("_proj.weight")}
    convert_layers(model, names, torch.bfloat16)
    gains = planting.input_outliers(model, planting.Planting(3, 1))

    def check() -> None:
        theirs = dict(other.named_parameters())
        for name, parameter in model.named_parameters():
            assert parameter.data_ptr() == theirs[name].data_ptr(), name
            assert torch.equal(parameter, theirs[name]), name

    check()
    before = other.lm_head.weight.detach().clone()
    learner.plant(gains)
    tokens = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(0))
    assert not torch.equal(model(tokens).logits, other(tokens).logits)  # one alone is in FP8
    learner.backward(model(tokens).logits.logsumexp(-1).mean())
    learner.step()
    assert not torch.equal(other.lm_head.weight, before)
    check()
    learner.restore({name: tensor.clone() for name, tensor in learner.state().items()})
    check()


SIZES_OF_MODELS = [(model, size) for size in models.DENSE for model in models.models_of(size)]


@pytest.mark.parametrize(("model", "size"), SIZES_OF_MODELS)
def test_dimensions_suit_block_fp8(model: str, size: str) -> None:
    with torch.device("meta"):
        made = models.build(model, size, seed=0)
    for name, weight in made.named_parameters():
        if "_proj" in name:
            assert all(n % 128 == 0 for n in weight.shape[-2:]), name
    least, most = {"tiny": (1e5, 1e7), "full": (1e8, 2e8), "large": (5e8, 1e9)}[size]
    assert least < made.num_parameters() < most


@pytest.mark.parametrize(("study", "size"), [("doses", "full"), ("long", "large")])
def test_requests_of_a_step_fit_into_the_cache(study: str, size: str) -> None:
    settings = replace(SIZES[size], **OF_STUDY[study])
    problems = tasks.draw_problems(400, "a", levels=settings.levels)
    longest = max(len(problem.prompt) for problem in problems)
    longest += tasks.max_new_tokens(settings.levels)
    with torch.device("meta"):
        assert longest < models.build("dense", size, 0).config.max_position_embeddings
    assert settings.prompts * settings.group * longest <= settings.kv_tokens


@pytest.mark.parametrize("model", models.MODELS)
def test_the_start_is_made_once_and_repeats_by_its_number(model: str, tmp_path: Path) -> None:
    first, second, other = (Study(tmp_path / n, "tiny", SMALL, CPU) for n in ("a", "b", "c"))
    folder = start.start_of(first, model)
    assert [path.name for path in first.state.iterdir()] == [f"start-{model}"]
    mine, again = weights_of(folder), weights_of(start.start_of(second, model))
    assert all(torch.equal(mine[name], again[name]) for name in mine)
    assert not torch.are_deterministic_algorithms_enabled()
    before = models.build(model, "tiny", 0).state_dict()
    after = models.load(folder, CPU)
    routers = [name for name in before if name.endswith("mlp.gate.weight")]
    assert bool(routers) == models.has_experts(model)
    for name in (*routers, "lm_head.weight"):
        assert not torch.equal(after.state_dict()[name], before[name].bfloat16().float()), name
    assert not getattr(after.config, "output_router_logits", False)
    assert start.start_of(first, model) == folder  # made once
    changed = weights_of(start.start_of(other, model, 1))
    assert not torch.equal(mine["lm_head.weight"], changed["lm_head.weight"])


ROUNDED = 1e-5
"""Between weights in BF16 of one rank and of two, as a part of what was learned. Healthy: 8e-7."""


@pytest.mark.timeout(180)
def test_ranks_train_together_what_one_trains(tmp_path: Path) -> None:
    settings = {"demonstrations": 3, "demonstration_batch": 5, "least_start_reward": 0.0}
    module = ["benchmarks.parity.start", "--study", "long", "--size", "tiny", "--model", "dense"]
    module += ["--state", str(tmp_path / "two"), "--settings", json.dumps(settings)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run([*torchrun, "--nproc-per-node", "2", "-m", *module], check=True, timeout=170)
    made = replace(SMALL, **OF_STUDY["long"] | settings)
    alone = start.start_of(Study(tmp_path / "one", "tiny", made, CPU), "dense")
    two, one = weights_of(tmp_path / "two" / "start-dense"), weights_of(alone)
    before = models.build("dense", "tiny", 0).state_dict()
    apart = sum((two[name].float() - one[name].float()).abs().sum() for name in one)
    learned = sum((before[name] - one[name].float()).abs().sum() for name in one)
    assert apart < ROUNDED * learned


@pytest.mark.parametrize("model", models.MODELS)
def test_the_start_ends_at_the_reward_that_was_asked_for(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "LONGEST", dict.fromkeys(tasks.LEVELS, 40))
    found: list[float] = []
    true_reward = start.reward_of

    def reward_of(model: Any, count: int, levels: list[int]) -> float:
        assert (count, levels) == (SMALL.evaluation_problems, SMALL.levels)
        assert true_reward(model, count, levels) == 0  # so early
        found.append(0.1 * (len(found) + 1))
        return found[-1]

    monkeypatch.setattr(start, "reward_of", reward_of)
    small = replace(SMALL, demonstrations_every=2)
    start.train(model, "tiny", replace(small, demonstrations=9, start_reward=0.2), CPU)
    assert found == [0.1, 0.2]
    found.clear()
    least = {"demonstrations": 5, "start_reward": 2.0, "least_start_reward": 0.2}
    start.train(model, "tiny", replace(small, **least), CPU)
    assert found == [0.1, 0.2]  # demonstrations were at an end
    found.clear()
    with pytest.raises(ValueError, match=r"solves 0\.200 .* has to solve 0\.21"):
        start.train(model, "tiny", replace(small, **least | {"least_start_reward": 0.21}), CPU)


@pytest.mark.parametrize("model", models.MODELS)
def test_reward_is_of_the_problems_that_a_policy_solves(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of different lengths, of which the policy has learnt some by heart."""
    answers = {"T+9=": "9", "T+1+2+3=": "6", "Sba=": "ab", "Sdcba=": "abcd", "P2*3=": "6"}
    problems = [
        Problem({"T": "total", "S": "sort", "P": "product"}[prompt[0]], 1, prompt, answer)
        for prompt, answer in answers.items()
    ]
    shown = [answer if index < 3 else "no" for index, answer in enumerate(answers.values())]
    made = models.build(model, "tiny", 0)
    learner = Learner(made, 3e-3)
    prompts = [arithmetic.encode(problem.prompt) for problem in problems]
    responses = [arithmetic.encode(text + END) for text in shown]
    for _ in range(40):
        logprobs_BT = response_logprobs(made, prompts, responses)
        learner.backward(-logprobs_BT[tiny_model.mask_of(responses)].mean())
        learner.step()
    monkeypatch.setattr(tasks, "draw_problems", lambda *args, **kwargs: problems)
    assert start.reward_of(made, len(problems), [1]) == pytest.approx(3 / 5)
    assert start.reward_of(models.build(model, "tiny", 0), len(problems), [1]) == 0
