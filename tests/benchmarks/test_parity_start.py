"""The models of the experiment, and the weights that its runs begin with."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.parity import policies, pretraining, rollouts, tasks
from benchmarks.parity.learner import Learner
from benchmarks.parity.paths import START_SETTINGS
from benchmarks.parity.settings import SETTINGS
from benchmarks.parity.tasks import Problem
from examples.grpo import arithmetic, tiny_model
from examples.grpo.arithmetic import END
from trainer_bridge import KVCalibrator, response_logprobs

SMALL = replace(SETTINGS["tiny"], demonstrations=3, demonstration_batch=4)


def start(state: Path, model: str = "dense", **settings: Any) -> Path:
    cpu = torch.device("cpu")
    return pretraining.start_of(state, model, "tiny", replace(SMALL, **settings), cpu)


def test_planting_changes_k_but_not_the_policy() -> None:
    model = policies.build("dense", "tiny", 0).to(torch.bfloat16)
    tokens = torch.randint(128, (2, 40), generator=torch.Generator().manual_seed(0))

    def look() -> tuple[torch.Tensor, torch.Tensor]:
        calibrator = KVCalibrator.of(model, margin=448)  # its scales are then magnitudes
        with torch.no_grad(), calibrator.watch(model):
            logits = model(tokens, use_cache=False).logits
        return logits, calibrator.scales()[:, 0].amin()

    before, amax = look()
    frozen = policies.plant(model)
    after, planted = look()
    assert torch.equal(before, after)
    assert amax < 20 < 448 < planted
    assert len(frozen) == 2 * model.config.num_hidden_layers
    trained = Learner(model, 1e-3, frozen).state()
    assert not any("q_norm" in name or "k_norm" in name for name in trained)


@pytest.mark.parametrize("model", policies.MODELS)
@pytest.mark.parametrize("size", policies.SIZES)
def test_dimensions_suit_block_fp8(model: str, size: str) -> None:
    with torch.device("meta"):
        made = policies.build(model, size, seed=0)
    for name, weight in made.named_parameters():
        if "_proj" in name:
            assert all(n % 128 == 0 for n in weight.shape[-2:]), name
    if size == "full":
        assert 100e6 < made.num_parameters() < 200e6


@pytest.mark.parametrize("model", policies.MODELS)
def test_the_start_repeats_by_seed(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = start(tmp_path / "a", model)
    assert policies.fingerprint(folder) == policies.fingerprint(start(tmp_path / "b", model))
    assert not torch.are_deterministic_algorithms_enabled()
    before = policies.build(model, "tiny", pretraining.START_SEED).state_dict()
    after = policies.load(folder, torch.device("cpu"))
    routers = [name for name in before if name.endswith("mlp.gate.weight")]
    assert bool(routers) == (model == "moe")
    for name in (*routers, "lm_head.weight"):
        assert not torch.equal(after.state_dict()[name], before[name].to(torch.bfloat16)), name
    assert not getattr(after.config, "output_router_logits", False)
    monkeypatch.setattr(pretraining, "_train", None)
    assert start(tmp_path / "a", model) == folder  # made once
    monkeypatch.undo()
    monkeypatch.setattr(pretraining, "START_SEED", 1)
    assert policies.fingerprint(start(tmp_path / "c", model)) != policies.fingerprint(folder)


@pytest.mark.parametrize("model", policies.MODELS)
def test_the_start_ends_at_the_reward_that_was_asked_for(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretraining, "EVALUATE_EVERY", 2)
    monkeypatch.setattr(tasks, "MAX_NEW_TOKENS", 40)
    found: list[float] = []
    true_reward = pretraining.reward_of

    def reward_of(model: Any, count: int) -> float:
        assert count == SMALL.evaluation_problems
        assert true_reward(model, count) == 0  # so early
        found.append(0.1 * (len(found) + 1))
        return found[-1]

    monkeypatch.setattr(pretraining, "reward_of", reward_of)
    start(tmp_path / "a", model, demonstrations=9, start_reward=0.2)
    assert found == [0.1, 0.2]
    found.clear()
    start(tmp_path / "b", model, demonstrations=5, start_reward=2.0)
    assert found == [0.1, 0.2]  # demonstrations were at an end
    fingerprints = {policies.fingerprint(next((tmp_path / name).iterdir())) for name in "ab"}
    assert len(fingerprints) == 2


@pytest.mark.parametrize("model", policies.MODELS)
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
    made = policies.build(model, "tiny", 0)
    learner = Learner(made, 3e-3)
    prompts = [arithmetic.encode(problem.prompt) for problem in problems]
    responses = [arithmetic.encode(text + END) for text in shown]
    for _ in range(40):
        logprobs_BT = response_logprobs(made, prompts, responses)
        learner.backward(-logprobs_BT[tiny_model.mask_of(responses)].mean())
        learner.step()
    monkeypatch.setattr(rollouts, "problems_of", lambda *args, **kwargs: problems)
    assert pretraining.reward_of(made, len(problems)) == pytest.approx(3 / 5)
    assert pretraining.reward_of(policies.build(model, "tiny", 0), len(problems)) == 0


def test_a_start_of_other_demonstrations_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = start(tmp_path, demonstrations=1)
    monkeypatch.setattr(pretraining, "_train", None)
    others = {
        "demonstrations": 2,
        "demonstration_batch": 5,
        "demonstration_rate": 1.0,
        "start_reward": 0.9,
        "evaluation_problems": 7,
    }
    for name, value in others.items():
        with pytest.raises(ValueError, match=f"trained with other {name}; give the same"):
            start(tmp_path, **{"demonstrations": 1, name: value})
    # What concerns GRPO alone may be another.
    assert start(tmp_path, demonstrations=1, rate=1.0, prompts=9) == folder
    (folder / START_SETTINGS).unlink()  # nobody knows what that one is
    with pytest.raises(ValueError, match=f"trained with other {', '.join(sorted(others))};"):
        start(tmp_path, demonstrations=1)


def test_the_start_of_a_faster_process_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = pretraining._train
    demonstrations = 1

    def overtaken(*args: Any) -> Learner:
        monkeypatch.setattr(pretraining, "_train", train)
        start(tmp_path, demonstrations=demonstrations)
        return train(*args)

    monkeypatch.setattr(pretraining, "_train", overtaken)
    folder = start(tmp_path, demonstrations=1)
    assert list(tmp_path.iterdir()) == [folder]
    assert (folder / "model.safetensors").exists()
    # The control: the faster process was given other settings.
    folder.rename(folder.with_name("other"))
    demonstrations = 2
    monkeypatch.setattr(pretraining, "_train", overtaken)
    with pytest.raises(ValueError, match="trained with other demonstrations"):
        start(tmp_path, demonstrations=1)


def test_a_start_that_cannot_be_moved_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(OSError, match="No space left"):
        start(tmp_path, demonstrations=1)
    [kept] = tmp_path.iterdir()
    assert (kept / "model.safetensors").exists()
    assert json.loads((kept / START_SETTINGS).read_text())["demonstrations"] == 1
