"""Planted faults in small: alarms fire on each, and are silent on what is healthy."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))

import alarm_arms
import alarm_tables
import alarm_tasks
import alarms
from alarm_tasks import TASKS, Policy

DOCS = Path(__file__).parents[2] / "docs" / "correction.md"
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


def test_the_results_are_of_todays_thresholds_and_make_the_tables() -> None:
    text = alarms.RESULTS.read_text()
    first = [row for row in json.loads(text)["rows"] if "alarms" in row]
    assert {(row["model"], row["arm"]) for row in first} == {
        (model, arm) for model in TASKS for arm in alarm_arms.ARMS
    }
    for row in first:
        assert not (row["case"] == "healthy" and row["alarms"]), row["arm"]
    for model in TASKS:
        fired = {row["arm"]: row["alarms"] for row in first if row["model"] == model}
        if model == "text":  # where 20 steps change as much as FP8 does
            fired |= {name: "silent" for name in FAULTS if "20 steps" in name}
        for name in ("one matrix's scales doubled", *TRAINED_ONLY, *FAULTS):
            assert fired[name], name
    assert alarm_tables.margins(text) in DOCS.read_text()
    assert alarm_tables.faults(text) in DOCS.read_text()
