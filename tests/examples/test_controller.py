"""The controller: which mitigation it asks for, when, and what it says."""

import json
import math
import shlex
from argparse import ArgumentParser
from typing import Any

import pytest
import torch

from examples.controller import Controller, Decision
from server_args import Fp8RLServerArgs
from trainer_bridge.correction import PRESETS, CorrectionConfig, correct_logprobs
from trainer_bridge.metrics import mismatch_metrics

BUDGET = 0.005
PATIENCE = 3
LAYERS = [f"model.layers.{number}.mlp.down_proj" for number in range(3)]


def metrics(
    kl: float = 1e-4, ess: float = 0.9998, weights: float = 1.0, cut: float = 0.0, top: float = 9.0
) -> dict[str, float]:
    """``weights``: their effective sample size; ``cut``: of the ratios' mass."""
    found = {"mismatch_kl_k3": kl, "ess": ess, "weight_ess": weights, "ratio_max": top}
    return found | {"ratio_mean": 1.0, "weight_mean": 1 - cut}


FINE, TAIL = metrics(), metrics(kl=0.004, ess=0.6, weights=0.95)
APART = metrics(kl=0.02, ess=0.991, weights=0.991)


def controller(**options: Any) -> Controller:
    return Controller(BUDGET, patience=PATIENCE, **options)


def feed(made: Controller, given: dict[str, float], steps: int = PATIENCE) -> Decision:
    """The last decision; those before it change nothing."""
    decisions = [made.observe(given) for _ in range(steps)]
    assert not any(decision.reasons for decision in decisions[:-1])
    return decisions[-1]


def test_a_healthy_run_is_left_alone() -> None:
    made = controller(fp8_kv=True, layers=LAYERS)
    assert feed(made, FINE, 50) == Decision(CorrectionConfig(), (), ())


def test_a_heavy_tail_tightens_c_and_then_masks() -> None:
    made = controller()
    thresholds = []
    for _ in range(4):
        decision = feed(made, TAIL)
        assert len(decision.reasons) == 1 and not decision.requests
        thresholds.append(decision.config.rollout_is_threshold)
    assert thresholds == [pytest.approx(1.7), 1.5, (0.5, 2.0), (0.5, 2.0)]
    assert "no request is left" in decision.reasons[0]


def test_c_is_left_where_it_does_not_help() -> None:
    given = metrics(ess=0.95, weights=0.95, top=1.6)  # C = 1.7 would cut nothing
    decision = feed(controller(fp8_kv=True), given)
    assert decision.config == CorrectionConfig() and len(decision.requests) == 1
    assert "--kv-cache-dtype bf16" in decision.reasons[0]
    # a tail with much mass is masked at once
    decision = feed(controller(), TAIL | {"weight_mean": 0.94})
    assert decision.config.rollout_is_threshold == (0.5, 2.0) and not decision.requests


def test_precision_is_asked_for_in_order_and_each_time_waited_for() -> None:
    made = controller(fp8_kv=True, layers=LAYERS, layers_at_once=2)
    flags = []
    for _ in range(3):
        asked = feed(made, APART)
        assert asked.config == CorrectionConfig() and len(asked.reasons) == 1
        flags.append([request.flag for request in asked.requests])
        assert feed(made, APART, 20).requests == asked.requests  # not before the restart
        made.restarted()
    kv, option = "--kv-cache-dtype bf16", "--fp8rl-ignored-layers"
    assert flags == [
        [kv],
        [kv, f"{option} '{LAYERS[0]} {LAYERS[1]}'"],
        [kv, f"{option} '{' '.join(LAYERS)}'"],
    ]
    assert "no request is left" in feed(made, APART).reasons[0]
    assert feed(controller(layers=LAYERS[:1]), APART).requests[0].flag == f"{option} {LAYERS[0]}"


def test_the_flags_are_the_engines_own() -> None:
    """What is asked for reads back as what was meant."""
    request = feed(controller(layers=LAYERS), APART).requests[0]
    parser = ArgumentParser()
    Fp8RLServerArgs.add_arguments(parser)
    parsed = Fp8RLServerArgs.from_namespace(parser.parse_args(shlex.split(request.flag)), {})
    assert parsed.ignored_layers == tuple(LAYERS)


def test_it_loosens_one_step_at_a_time_and_only_well_below_the_budget() -> None:
    # Within the budget, but more than half of it: the weights are small since C is.
    for given in (metrics(ess=0.994), metrics(kl=0.003), FINE):
        made = controller()
        for _ in range(3):
            strict = feed(made, TAIL).config
        assert strict.rollout_is_threshold == (0.5, 2.0)
        if given is not FINE:
            assert feed(made, given, 20).config == strict
    back = [feed(made, FINE) for _ in range(3)]
    assert [d.config.rollout_is_threshold for d in back] == [1.5, pytest.approx(1.7), 2.0]
    assert "C = 2 " in back[-1].reasons[0]
    assert feed(made, FINE, 20).config == CorrectionConfig()


def test_wrong_logprobs_ask_for_nothing() -> None:
    made = controller(fp8_kv=True)
    wrong = APART | {"ratio_mean": 1.05, "tokens": 1e5}
    for _ in range(10):
        decision = made.observe(wrong)
        assert decision.config == CorrectionConfig() and not decision.requests
        assert "ratio_mean" in decision.reasons[0] and "1.05" in decision.reasons[0]
    # controls: right ones, and those of policies so far apart that no tail was sampled
    for right in (APART, APART | {"mismatch_kl_k3": 0.2, "ratio_mean": 0.95}):
        assert feed(controller(fp8_kv=True), right).requests


def test_it_goes_on_from_a_checkpoint() -> None:
    course = [FINE, *[TAIL] * 4, *[APART] * 9, *[FINE] * 7]

    def run(stop: int) -> list[Decision]:
        made, decisions = controller(fp8_kv=True, layers=LAYERS), []
        for step, given in enumerate(course):
            if step == stop:
                state = json.loads(json.dumps(made.state_dict()))
                made = controller(fp8_kv=True, layers=LAYERS)
                made.load_state_dict(state)
            if step == 10:
                made.restarted()
            decisions.append(made.observe(given))
        return decisions

    whole = run(-1)
    assert len({d.config.rollout_is_threshold for d in whole}) > 1 and whole[-1].requests
    for stop in range(len(course)):
        assert run(stop) == whole


def test_a_checkpoint_of_another_controller() -> None:
    """One of another patience is taken, one of a config with more thresholds is not."""
    saved, impatient = controller(), Controller(BUDGET, patience=1)
    for _ in range(2):
        saved.observe(FINE)
    impatient.load_state_dict(saved.state_dict())
    assert impatient.observe(TAIL) == Controller(BUDGET, patience=1).observe(TAIL)
    saved, masked = controller(), CorrectionConfig("token", (0.5, 2.0))
    feed(saved, TAIL)
    other = controller(config=masked)
    with pytest.raises(ValueError, match="config of that run"):
        other.load_state_dict(saved.state_dict())
    assert feed(other, FINE) == Decision(masked, (), ())  # it is as it was


def test_other_configs() -> None:
    masked = CorrectionConfig("token", (0.5, 5.0), rollout_rs={"seq_mean_k3": 0.01})
    assert feed(controller(config=masked, fp8_kv=True), TAIL).config == masked  # it has no C
    for config in ("decoupled_seq_is", "decoupled_geo_rs"):
        with pytest.raises(ValueError, match=r"rollout_is .*'token'"):
            Controller(BUDGET, PRESETS[config])
    Controller(BUDGET, CorrectionConfig("token", bypass_mode=True, loss_type="reinforce"))
    with pytest.raises(ValueError, match="gets no weights"):
        Controller(BUDGET, CorrectionConfig("token", bypass_mode=True))
    for budget in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="budget_kl"):
            Controller(budget)
    with pytest.raises(ValueError, match="weight_ess, weight_mean"):
        Controller(BUDGET).observe(mismatch_metrics(*[torch.zeros(1, 2)] * 2, torch.ones(1, 2) > 0))


def test_tightening_wins_sample_size_and_does_not_change_the_kl() -> None:
    """On a real heavy tail: what the module says of its mitigations."""
    generator = torch.Generator().manual_seed(0)
    noise_BT = 0.02 * torch.randn(64, 512, generator=generator)
    noise_BT[:, ::100] += 1.2  # tokens that the trainer likes better
    noise_BT -= noise_BT.exp().mean().log()  # what one is liked better, another is liked less
    rollout_BT = torch.full((64, 512), -3.0)
    given = rollout_BT + noise_BT, rollout_BT, torch.ones(64, 512, dtype=torch.bool)
    made, seen = Controller(0.004, patience=1, fp8_kv=True), []
    config, reasons = CorrectionConfig(), []
    for _ in range(4):
        found = correct_logprobs(*given, config).metrics
        decision = made.observe(found)
        seen.append((found["mismatch_kl_k3"], found["weight_ess"]))
        config, reasons = decision.config, [*reasons, *decision.reasons]
    assert len({kl for kl, _ in seen}) == 1
    sizes = [size for _, size in seen]
    assert sizes[0] < math.exp(-2 * 0.004) < sizes[-1] and sizes == sorted(sizes)
    assert decision.requests and "--kv-cache-dtype bf16" in reasons[-1]
