"""Alarms: what each metric must be to have one, and that healthy runs have none."""

import json
import logging
import math
from pathlib import Path

import pytest
import torch

from trainer_bridge import Alarm, check_alarms
from trainer_bridge.correction import CorrectionConfig, correct_logprobs
from trainer_bridge.metrics import alarms as module
from trainer_bridge.metrics import mismatch_metrics

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
HEALTHY = {
    "tokens": 20_000.0,  # the standard error of the mean ratio is below 0.0008
    "mismatch_kl_k3": 0.004,  # of 8B models, published
    "rollout_nll": 0.3,
    "token_mult_prob_error": 1.03,
    "ess": 0.99,
    "chi2_token": 0.002,
    "ratio_mean": 1.002,
    "weight_ess": 0.99,
    "masked_fraction": 0.02,
    "kv_clipped": 1e-4,
}


def names(**changed: float) -> list[str]:
    return [alarm.metric for alarm in check_alarms(HEALTHY | changed)]


def test_each_metric_alone_can_fire() -> None:
    assert names() == []
    tried = set()
    for metric, value in (
        ("mismatch_kl_k3", 0.016),  # of an entropy of 0.3
        ("token_mult_prob_error", 1.51),
        ("ess", 0.79),
        ("ratio_mean", 1.0051),
        ("ratio_mean", 0.9949),
        ("weight_ess", 0.29),
        ("masked_fraction", 0.51),
        ("kv_clipped", 0.0011),
    ):
        (alarm,) = check_alarms(HEALTHY | {metric: value})
        assert isinstance(alarm, Alarm) and (alarm.metric, alarm.value) == (metric, value)
        assert module.ADVICE[metric] in alarm.message
        tried.add(metric)
    assert tried == set(module.ADVICE)


def of_version(number: int, **metrics: float) -> dict[str, float]:
    return {f"version_{number}/{name}": value for name, value in metrics.items()}


KL, KL_OF_3 = "mismatch_kl_k3", "version_3/mismatch_kl_k3"
FAR_3 = {"mismatch_kl_k3": 0.2, "chi2_token": 0.0, "tokens": 5000.0, "ratio_mean": 0.99}


@pytest.mark.parametrize(
    ("changed", "fired"),
    [
        # a sure policy may differ by less than an undecided one, and one without entropy by a bit
        ({KL: 0.004, "rollout_nll": 0.03}, [KL]),
        ({KL: 0.09, "rollout_nll": 2.0}, []),
        ({KL: 0.11, "rollout_nll": 2.0}, [KL]),
        ({KL: 9e-4, "rollout_nll": 0.0}, []),
        # a version is held against its own entropy
        (of_version(3, tokens=600.0, mismatch_kl_k3=0.01, rollout_nll=0.3), []),
        (of_version(3, tokens=600.0, mismatch_kl_k3=0.01, rollout_nll=0.1), [KL_OF_3]),
        # ratios below one are put down to policies that are far apart
        ({KL: 0.016, "ratio_mean": 0.99}, [KL]),
        ({KL: 0.016, "ratio_mean": 1.01}, [KL, "ratio_mean"]),
        (of_version(3, **FAR_3), [KL_OF_3]),
        (of_version(3, **FAR_3) | {"ratio_mean": 0.99}, ["ratio_mean", KL_OF_3]),
        # few tokens are not judged
        ({"ess": 0.1, KL: 9.0, "tokens": 511.0}, []),
        ({"ess": 0.1, KL: 9.0, "tokens": 512.0}, [KL, "ess"]),
    ],
)
def test_what_fires(changed: dict[str, float], fired: list[str]) -> None:
    assert names(**changed) == fired


def test_the_entropy_is_by_token_as_the_kl_is() -> None:
    """Short undecided sequences must not hide what long sure ones do."""
    lengths_B = torch.tensor([1000] * 4 + [4] * 4)
    mask_BT = torch.arange(1000) < lengths_B[:, None]
    rollout_BT = torch.where(lengths_B[:, None] == 4, -3.0, -0.05).expand(8, 1000)
    generator = torch.Generator().manual_seed(0)
    noise_BT = torch.where(torch.rand(8, 1000, generator=generator) < 0.06, -1.0, 0.04)
    noise_BT -= noise_BT[mask_BT].exp().mean().log()
    found = correct_logprobs(rollout_BT + noise_BT, rollout_BT, mask_BT)
    entropy = (1000 * 0.05 + 4 * 3.0) / 1004
    assert found.metrics["rollout_nll"] == pytest.approx(entropy)
    assert found.metrics["rollout_log_ppl"] == pytest.approx(1.525)  # the control: by sequence
    kl = found.metrics["mismatch_kl_k3"]
    assert module.KL_OF_ENTROPY * entropy < kl < module.KL_OF_ENTROPY * 1.525
    (alarm,) = found.alarms
    assert alarm.metric == "mismatch_kl_k3"
    assert alarm.threshold == pytest.approx(module.KL_OF_ENTROPY * entropy)


def test_a_mean_ratio_is_held_against_its_own_error() -> None:
    wide = {"chi2_token": 0.5, "tokens": 1000.0}  # the standard error is 0.008 to 0.03
    for near, far in ((0.95, 0.8), (1.05, 1.2)):
        assert names(ratio_mean=near, **wide) == []
        assert names(ratio_mean=far, **wide) == ["ratio_mean"]
        assert names(ratio_mean=near, **wide | {"tokens": 10_000.0}) == ["ratio_mean"]
        (alarm,) = check_alarms(HEALTHY | wide | {"ratio_mean": far})
        error = math.sqrt((1.5 - far**2) / 1000)
        assert alarm.threshold == pytest.approx(1 + math.copysign(6 * error, far - 1))


@pytest.mark.parametrize("spread", [0.0, 0.06])
def test_a_tail_that_was_not_sampled(spread: float) -> None:
    """A broken policy with E[r] = 1 exactly: 2 tokens in 10000 have r = 50, so that of batches of
    5000 a third has none of them. Where other tokens differ by nothing (``spread`` 0), such a batch
    looks as with top-p, and the mean ratio is told: the limit that is left."""
    generator = torch.Generator().manual_seed(0)
    rare, high, shape = 2e-4, 50.0, (5, 1000)
    others = math.log((1 - rare * high) / (1 - rare)) - spread**2 / 2
    rollout_BT, sure = torch.full(shape, -9.0), {"rollout_nll": module.ENTROPY_FLOOR}
    found = []
    for _ in range(200):
        x_BT = others + spread * torch.randn(shape, generator=generator)
        x_BT[torch.rand(shape, generator=generator) < rare] = math.log(high)
        mask_BT = torch.ones(shape, dtype=torch.bool)
        found.append(mismatch_metrics(rollout_BT + x_BT, rollout_BT, mask_BT) | sure)
    told = [{alarm.metric for alarm in check_alarms(metrics)} for metrics in found]
    alone = [check_alarms(metrics | {"mismatch_kl_k3": 0.0}) for metrics in found]
    assert sum("ratio_mean" in {a.metric for a in each} for each in alone) > 40  # without the rule
    if spread:
        assert all("mismatch_kl_k3" in fired and "ratio_mean" not in fired for fired in told)
    else:
        assert sum(fired == {"ratio_mean"} for fired in told) > 40


def test_versions_are_judged_apart() -> None:
    sick = of_version(-1, ess=0.1, mismatch_kl_k3=9.0) | {"version_7/ess": 0.99}
    sick |= {"position_16/ess": 0.1}
    assert names(**sick, **{"version_-1/tokens": 511.0}) == []
    shown = check_alarms(HEALTHY | sick | {"version_-1/tokens": 512.0})
    assert [alarm.metric for alarm in shown] == [f"version_-1/{name}" for name in (KL, "ess")]
    assert [alarm.name for alarm in shown] == [KL, "ess"]
    assert shown[1].message.startswith("ess of policy version -1 is 0.1, below 0.8: ")


def test_correct_fills_them_and_logs_the_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_announced", set())
    generator = torch.Generator().manual_seed(0)
    rollout_BT = -4 - torch.rand(8, 128, generator=generator)
    noise_BT = torch.randn(8, 128, generator=generator)
    mask_BT = torch.ones(8, 128, dtype=torch.bool)
    versions_BT = torch.arange(8)[:, None].expand(8, 128) // 4  # two versions, 512 tokens each
    with caplog.at_level(logging.WARNING, module.__name__):
        healthy = correct_logprobs(rollout_BT + 0.02 * noise_BT, rollout_BT, mask_BT)
        assert healthy.alarms == () and not caplog.records
        spread_B1 = torch.where(torch.arange(8) < 4, 0.02, 0.8)[:, None]
        given = rollout_BT + spread_B1 * noise_BT - spread_B1**2 / 2, rollout_BT, mask_BT
        for config in (CorrectionConfig(), CorrectionConfig(rollout_rs={"token_k2": 1e-4})):
            sick = correct_logprobs(*given, config, versions_BT=versions_BT)
            assert sick.alarms == check_alarms(sick.metrics)
            fired = {alarm.metric for alarm in sick.alarms}
            assert {"mismatch_kl_k3", "version_1/mismatch_kl_k3", "version_1/ess"} <= fired
            assert not any(name.startswith("version_0/") for name in fired)
    assert "masked_fraction" in fired and "ratio_mean" not in fired
    logged = [record.getMessage().partition(" ")[0] for record in caplog.records]
    assert len(logged) == len(set(logged)) == len({alarm.name for alarm in sick.alarms})


@pytest.mark.parametrize("file", ["grpo.jsonl", "grpo_gpu.jsonl"])
def test_recorded_runs_are_silent(file: str) -> None:
    """60 steps of BF16 and of FP8 each, judged as the surest policy, whose entropy is 0, would be;
    controls: what they say with a fault put in."""
    lines = (json.loads(line) for line in (RESULTS / file).read_text().splitlines())
    steps = [row for row in lines if row["kind"] == "step"]
    assert len(steps) == 120
    for row in steps:
        sure = row | {"rollout_nll": 0.0}
        assert check_alarms(sure) == ()
        for fault in ({"ratio_mean": 1.02}, {"mismatch_kl_k3": 0.0011}):
            assert [alarm.metric for alarm in check_alarms(sure | fault)] == [*fault]
