"""The verdict of ``verl_parity`` in ``benchmarks.frameworks``, recorded and planted."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks.frameworks import verl_parity
from benchmarks.parity.run_log import rows_of
from benchmarks.run import RESULTS
from benchmarks.tables.learning import draw
from benchmarks.tables.verl_parity import judge, table

Rows = list[dict[str, Any]]


def rows(**fp8: float) -> Rows:
    """Two steps of two seeds; ``fp8`` is added to the metrics of its last step."""
    made = []
    for arm in ("bf16", "fp8"):
        for seed in range(2):
            for step in (1, 2):
                values = {"reward": 0.5 + 0.01 * seed, "staleness": 0}
                if arm == "fp8" and step == 2:
                    values |= {name: values[name] + more for name, more in fp8.items()}
                kl = {"mismatch_kl_k3": 1e-4, "ess": 0.99}
                made.append({"step": step, "arm": arm, "seed": seed, **values, **kl})
    return made


def test_seeds_are_compared_in_pairs() -> None:
    verdict = judge(rows(reward=0.02))
    assert verdict["differences"] == pytest.approx([0.01, 0.01])
    assert verdict["within"] and verdict["stale_steps"] == 0


def test_a_worse_arm_and_stale_tokens_are_found() -> None:
    assert not judge(rows(reward=-0.4))["within"]
    assert judge(rows(staleness=1))["stale_steps"] == 2


def test_the_recorded_run_is_as_predicted() -> None:
    _, *recorded = rows_of(RESULTS / "verl_parity.jsonl")
    assert len(recorded) == len(verl_parity.ARMS) * verl_parity.SEEDS * verl_parity.STEPS
    verdict = judge(recorded)
    assert verdict["within"] and verdict["stale_steps"] == 0
    assert max(verdict["first_reward"]) < 0.6 and min(verdict["last_reward"]) > 0.9
    kl = {
        arm: fmean(row["mismatch_kl_k3"] for row in recorded if row["arm"] == arm)
        for arm in verl_parity.ARMS
    }
    assert kl["bf16"] < kl["fp8"]
    assert max(row["mismatch_kl_k3"] for row in recorded) < 0.1


def test_table_and_picture(tmp_path: Path) -> None:
    names = ("device", "date", "commit", "sglang", "verl", "torch", "transformers", "ray")
    found = [dict.fromkeys(names, "x"), *rows(reward=-0.4)]
    assert "not all within 0.1" in table(found)
    draw(found, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 0
