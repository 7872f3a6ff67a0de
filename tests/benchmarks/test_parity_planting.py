"""Planted outliers: the same policy and the same training to the last bit, and another engine."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.parity import learner, models, planting, sampling, tasks
from benchmarks.parity.learner import Learner
from benchmarks.parity.planting import Gains, Planting
from benchmarks.parity.scan import nearest
from benchmarks.parity.settings import SIZES, Study
from sgl_fp8rl.ops.reference import fp8_linear, quantize_weight
from tests.benchmarks.test_parity_run import a_batch
from trainer_bridge import hf_names
from trainer_bridge.fp8_forward import convert_layers

STEPS = 3
PLANTED = Planting(exponent=16, every=1)


def trained(model: str, dtype: torch.dtype, change: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """What a few steps lead to, and what was seen on the way.

    Args:
        change: from the gains of PLANTED to those that are planted.
    """
    made = models.build(model, "tiny", 0).to(dtype)
    torch.nn.init.normal_(made.model.layers[0].input_layernorm.weight, 1.0, 0.1)
    this = Learner(made, 1e-3)
    this.plant(change(planting.input_outliers(made, PLANTED)))
    problems = tasks.draw_problems(2, "a")
    seen = []
    for step in range(STEPS):
        batch = a_batch(problems, 4, f"step {step}")
        rewards_PG = torch.tensor(sampling.rewards_of(tasks.worked_out(), problems, batch))
        rewards_PG = rewards_PG.view(2, 4) + torch.arange(4)
        correction, norm = learner.learn(this, batch, rewards_PG, "decoupled_token_is")
        seen.append((norm, correction.metrics))
    return {name: tensor.clone() for name, tensor in this.state().items()}, seen


def unplanted(gains: Gains) -> Gains:
    return {}


def is_same(first: Any, second: Any) -> bool:
    (ours, seen), (theirs, also_seen) = first, second
    return seen == also_seen and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_training_is_the_same_to_the_last_bit(model: str, dtype: torch.dtype) -> None:
    plain = trained(model, dtype, unplanted)
    assert is_same(plain, trained(model, dtype, unplanted))  # it repeats
    assert is_same(plain, trained(model, dtype, lambda gains: gains))


def not_a_power_of_two(gains: Gains) -> Gains:
    return {
        name: torch.where(gain > 1, 3.0, torch.where(gain < 1, 1 / 3, gain))
        for name, gain in gains.items()
    }


def norms_alone(gains: Gains) -> Gains:
    return {name: gain for name, gain in gains.items() if name.endswith("norm.weight")}


def without_a_reader(gains: Gains) -> Gains:
    return {name: gain for name, gain in gains.items() if "layers.1.self_attn.v_proj" not in name}


@pytest.mark.parametrize("change", [not_a_power_of_two, norms_alone, without_a_reader])
def test_the_comparison_sees_what_is_not_the_same(change: Any) -> None:
    dtype = torch.float32
    assert not is_same(trained("dense", dtype, unplanted), trained("dense", dtype, change))


@pytest.mark.parametrize("model", models.MODELS)
def test_whatever_reads_a_planted_channel_undoes_it(model: str) -> None:
    with torch.device("meta"):
        made = models.build(model, "full", 0)
    gains = planting.input_outliers(made, Planting(13, 2))
    named = dict(made.named_parameters())
    readers = {name for name in named if name.endswith(planting.READERS)}
    for layer in range(made.config.num_hidden_layers):
        mine = {name for name in readers if f".{layer}." in name}
        assert len(mine) == 5, mine
    width = made.config.hidden_size
    for name, gain_H in gains.items():
        assert named[name].shape[-1] == width
        assert sorted(set(gain_H.tolist())) == ([2.0**-13, 1] if name in readers else [1, 2.0**13])
        assert (gain_H != 1).sum() == width // 256


def test_a_layer_in_fp8_errs_more_with_each_doubling() -> None:
    """The engine's linear, in the codes of the reference, beside the same product in FP64."""
    generator = torch.Generator().manual_seed(0)
    x_MK = torch.randn(64, 256, generator=generator)
    weight_NK = torch.randn(128, 256, generator=generator) * 0.02
    wanted_MN = x_MK.double() @ weight_NK.double().T
    errors = []
    for planted in [Planting(0, 1), *planting.plantings([12, 14, 16, 18, 20])]:
        gain_K = torch.ones(256)
        gain_K[:: planted.every * 128] = 2.0**planted.exponent
        got_MN = fp8_linear(
            (x_MK * gain_K).bfloat16(), *quantize_weight((weight_NK / gain_K).bfloat16())
        )
        errors.append(((got_MN.double() - wanted_MN).norm() / wanted_MN.norm()).item())
    assert errors == sorted(errors)
    assert errors[0] < 0.05 and errors[-1] > 0.5


def test_a_dose_is_the_gain_whose_mismatch_is_nearest_in_logarithm() -> None:
    measured = [1e-5, 4e-4, 2.9e-3, 1.1e-2, 9e-2, 1.1e-2]
    rows = [{"exponent": n, "mismatch_kl_k3": k3} for n, k3 in enumerate(measured)]
    assert [nearest(rows, dose)["exponent"] for dose in (1e-5, 1e-3, 1e-2, 5e-2)] == [1, 1, 3, 4]


def test_a_start_is_of_its_seeds(tmp_path: Path) -> None:
    settings = json.loads('{"seeds_a_start": 2}')
    study = Study(
        tmp_path, "tiny", SIZES["tiny"].__class__(**settings), torch.device("cpu"), "doses"
    )
    assert [study.start_of(seed) for seed in range(5)] == [0, 0, 1, 1, 2]
    assert study.start_folder("dense", 1) == tmp_path / "start-dense-1"


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_the_codes_of_a_trainer_follow_its_steps_and_what_is_planted(model: str) -> None:
    """``Learner`` writes weights without an optimizer that ``fp8_forward`` could watch."""

    def converted(made: Any) -> Any:
        names = {
            name
            for module_name, weight in made.named_parameters()
            if "_proj" in module_name
            for name, _ in hf_names.split(module_name, tuple(weight.shape), made.config.model_type)
        }
        convert_layers(made, names, torch.bfloat16)
        return made

    made = models.build(model, "tiny", 0)
    this = Learner(converted(made), 1e-2)
    tokens = torch.randint(128, (2, 24), generator=torch.Generator().manual_seed(0))
    seen: list[torch.Tensor] = []
    for planted in (None, Planting(17, 1), None):
        this.plant({} if planted is None else planting.input_outliers(made, planted))
        loss = made(tokens, use_cache=False).logits.float().square().mean()
        this.backward(loss)
        this.step()
        other = models.build(model, "tiny", 1)
        other.load_state_dict(made.state_dict())
        with torch.no_grad():
            ours, theirs = (
                each(tokens, use_cache=False).logits for each in (made, converted(other))
            )
        assert torch.equal(ours, theirs)
        seen.append(ours)
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
