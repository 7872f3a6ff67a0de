"""The verdict of ``trl_parity`` in ``benchmarks.frameworks``, recorded and planted."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.parity.run_log import rows_of
from benchmarks.run import RESULTS
from benchmarks.tables.learning import draw
from benchmarks.tables.trl import judge, table

Rows = list[dict[str, Any]]


def rows(**fp8: float) -> Rows:
    """Two steps of three seeds; ``fp8`` is added to the metrics of its last step."""
    made = []
    for arm in ("bf16", "fp8"):
        for seed in range(3):
            for step in range(2):
                values = {"reward": 0.5 + 0.01 * seed, "policy_version": step, "alarms": 0}
                if arm == "fp8" and step == 1:
                    values |= {name: values[name] + more for name, more in fp8.items()}
                kl = {"mismatch_kl_k3": 1e-4, "ess": 0.99}
                made.append({"step": step, "arm": arm, "seed": seed, **values, **kl})
    return made


def test_equal_arms_are_equivalent() -> None:
    verdict = judge(rows(reward=0.02))
    assert verdict["difference"] == pytest.approx(0.01)
    assert verdict["equivalent"] and verdict["versions_are_steps"]
    assert verdict["steps_with_an_alarm"] == 0


def test_a_worse_arm_an_alarm_and_a_wrong_version_are_found() -> None:
    assert not judge(rows(reward=-0.4))["equivalent"]
    assert judge(rows(alarms=1))["steps_with_an_alarm"] == 3
    assert not judge(rows(policy_version=1))["versions_are_steps"]


def test_the_recorded_run_is_as_predicted() -> None:
    _, *recorded = rows_of(RESULTS / "trl.jsonl")
    verdict = judge(recorded)
    assert verdict["equivalent"] and verdict["versions_are_steps"]
    assert verdict["steps_with_an_alarm"] == 0
    assert max(verdict["first_reward"]) < 0.6 and min(verdict["last_reward"]) > 0.9
    kl = {
        arm: [row["mismatch_kl_k3"] for row in recorded if row["arm"] == arm]
        for arm in ("bf16", "fp8")
    }
    assert sum(kl["bf16"]) < sum(kl["fp8"]) and max(kl["fp8"]) < 0.01


def test_table_and_picture(tmp_path: Path) -> None:
    environment = dict.fromkeys(
        ("device", "date", "commit", "sglang", "torch", "transformers", "trl", "accelerate"), "x"
    )
    found = [environment, *rows(reward=-0.4)]
    assert "not equivalent within 0.1" in table(found)
    draw(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 0
