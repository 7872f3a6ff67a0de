"""Planted faults in small: alarms fire on each, and are silent on what is healthy."""

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.alarms import arms as alarm_arms
from benchmarks.alarms import faults as alarms
from benchmarks.alarms import tasks as alarm_tasks
from benchmarks.alarms.tasks import TASKS, Policy
from benchmarks.benchmark import Run
from benchmarks.run import RESULTS
from benchmarks.tables.alarms import FIRED
from trainer_bridge.metrics import check_alarms

LOGIT_GAIN = 6.0
SEQUENCES, LENGTH = 128, 16  # 512 tokens a quarter, which is what one policy version needs

FAULTS = {
    "one matrix's scales lost (1.0)": "mismatch_kl_k3",
    "20 steps old": "mismatch_kl_k3",
    "1 of 4 engines 20 steps old": "version_0/mismatch_kl_k3",
    "trainer without temperature 0.7": "mismatch_kl_k3",
    "raw logprobs, temperature 0.7": "ratio_mean",
    "top-p 0.95, logprobs of it": "ratio_mean",
    "logprobs one token late": "ess",
}
TRAINED_ONLY = (  # what a random policy does not feel: it hardly attends, and never was another
    "FP8 KV at scale 1, K beyond 448",
    "one tensor never loaded",
)
HEALTHY = ("BF16", "FP8", "FP8, temperature 0.7", "FP8 + FP8 KV", "FP8 + FP8 KV, K beyond 448")


@pytest.fixture(scope="module")
def policy() -> Policy:
    """Random, and as sure as a trained one; 20 steps ago it was another."""
    task = replace(TASKS["text"], layers=2, length=LENGTH)
    model = alarm_tasks.build(task)
    model.lm_head.weight.data *= LOGIT_GAIN
    states = []
    for spread in (0.006, 0.0):
        moved = {k: v + spread * torch.randn_like(v) for k, v in model.state_dict().items()}
        states.append(moved)
    return Policy(task, model, [*[states[0]] * alarm_tasks.RL_STEPS, states[1]])


def fired(policy: Policy, name: str) -> set[str]:
    prompts_BL = policy.task.prompts(random.Random(0), SEQUENCES)
    generator = torch.Generator().manual_seed(0)
    return {
        alarm.metric
        for alarm in alarm_arms.roll_out(
            policy, alarm_arms.ARMS[name], prompts_BL, generator
        ).alarms
    }


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_rollouts_are_silent(policy: Policy, name: str) -> None:
    assert fired(policy, name) == set()


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_fire(policy: Policy, name: str) -> None:
    found = fired(policy, name)
    assert FAULTS[name] in found
    assert not any(metric.startswith("version_20/") for metric in found)


def test_a_policy_is_trained_once_for_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[alarm_tasks.Task] = []
    healthy = SimpleNamespace(metrics=dict.fromkeys(alarms.SHOWN, 0.5))
    monkeypatch.setattr(alarm_arms, "roll_out", lambda *_: healthy)
    monkeypatch.setattr(alarm_tasks, "teach", lambda task, *_: trained.append(task) or iter(()))
    monkeypatch.setattr(alarm_tasks, "reinforce", lambda *_: None)
    run = Run(tmp_path, tmp_path, tmp_path / "log", {"work": str(tmp_path)})
    for commit, times in (("first", 1), ("first", 1), ("second", 2)):
        monkeypatch.setattr(alarms, "commit", lambda commit=commit: commit)
        measurements = alarms.measure(TASKS["sums"], run)
        assert [measurement["arm"] for measurement in measurements] == list(alarm_arms.ARMS)
        assert len(measurements[0]["values"]["ess"]) == alarms.BATCHES and len(trained) == times


def test_the_results_are_of_todays_thresholds() -> None:
    rows = json.loads((RESULTS / "alarms.json").read_text())["rows"]
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        place = row["model"], row["arm"], row["case"]
        found.setdefault(place, {})[row["metric"]] = row["median"]
    assert found.keys() == {
        (model, arm.name, case)
        for model in TASKS
        for case, arms in alarm_arms.STATES.items()
        for arm in arms
    }
    fired: dict[tuple[str, str], dict[str, float]] = {}
    for (model, arm, case), metrics in found.items():
        counts = {k.removeprefix(FIRED): n for k, n in metrics.items() if k.startswith(FIRED)}
        fired[model, arm] = counts
        assert not (case == "healthy" and counts), arm
        # judged anew, from medians of the batches
        again = {alarm.metric for alarm in check_alarms(metrics)}
        whole = {name: count for name, count in counts.items() if "/" not in name}
        always = {name for name, count in whole.items() if count == alarms.BATCHES}
        assert always <= again <= whole.keys(), arm
    for name in ("one matrix's scales doubled", *TRAINED_ONLY, *FAULTS):
        assert fired["sums", name], name
        # of "text", 20 steps change as much as FP8 does
        assert fired["text", name] or "20 steps" in name, name
