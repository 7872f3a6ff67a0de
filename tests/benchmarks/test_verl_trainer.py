"""The benchmark of verl's trainer: its reward, its logs, its verdict, and runs that must fail."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.frameworks import verl_log, verl_trainer
from benchmarks.tables.verl import judge, memory, table

Rows = list[dict[str, Any]]
MIB = 1 << 20
RUN = {"arm": "fp8rl", "gpus": 1, "seed": 0}


def rows(**fp8rl: float) -> Rows:
    """Two steps of each arm with two seeds; ``fp8rl`` is added to its second step's metrics."""
    made: Rows = []
    for arm in ("bf16", "fp8rl"):
        for seed in range(2):
            run = {"arm": arm, "gpus": 1, "seed": seed}
            for step in (1, 2):
                values = {"reward": 0.5 + 0.01 * seed, "staleness": 0, "mismatch_kl_k3": 1e-4}
                if arm == "fp8rl" and step == 2:
                    values |= {name: values[name] + more for name, more in fp8rl.items()}
                times = {"step_s": 2.5, "update_weights_s": 0.1}
                made.append({"kind": "step", "step": step, **run, **values, **times})
            for step in range(3):
                free = {"before": 1000 * MIB, "least": 930 * MIB, "after": 936 * MIB}
                made.append({"kind": "memory", "step": step, "rank": 0, **run, **free})
    return made


def test_the_reward_is_the_share_of_even_numbers() -> None:
    assert verl_trainer.even(data_source="even", solution_str="2 3 4 8") == 0.75
    assert verl_trainer.even(solution_str="") == 0


@pytest.mark.parametrize(("more", "within"), [(0.02, True), (-0.4, False)])
def test_pairs_of_one_seed_are_compared(more: float, within: bool) -> None:
    verdict = judge(rows(reward=more))
    assert verdict["differences"] == pytest.approx(
        {("fp8rl", 1, seed): more / 2 for seed in range(2)}
    )
    assert ("not all within" in table(stamped(rows(reward=more)))) is not within


def test_tokens_of_an_old_policy_are_found() -> None:
    assert all(judge(rows())["of_the_last_policy"].values())
    assert not judge(rows(staleness=1))["of_the_last_policy"]["fp8rl", 1, 0]


def test_what_the_first_update_keeps_counts_apart() -> None:
    updates = [
        {"step": 0, "rank": 0, "before": 900, "least": 700, "after": 800},
        {"step": 0, "rank": 1, "before": 900, "least": 850, "after": 870},
        {"step": 1, "rank": 0, "before": 800, "least": 790, "after": 800},
        {"step": 1, "rank": 1, "before": 800, "least": 760, "after": 795},
    ]
    assert memory(updates) == (100, 40)


def test_a_run_that_failed_is_named_and_not_compared() -> None:
    failed = {"kind": "failure", **RUN, "error": "exit status 1: ValueError: x\nTraceback"}
    verdict = judge([*rows(), failed])
    assert set(verdict["differences"]) == {("fp8rl", 1, 1)}
    assert "failed: `exit status 1: ValueError: x`" in table(stamped([*rows(), failed]))


def test_what_verl_leaves_becomes_rows(tmp_path: Path) -> None:
    metrics = {"critic/score/mean": 0.5, "timing_s/step": 2.0, "other": 1}
    (tmp_path / verl_log.METRICS).write_text(json.dumps({"step": 1, "data": metrics}) + "\n")
    (tmp_path / verl_log.MEMORY).write_text(json.dumps({"step": 0, "rank": 0}) + "\n")
    step, update, failure = verl_log.rows(tmp_path, RUN, "why")
    assert step == {"kind": "step", **RUN, "step": 1, "reward": 0.5, "step_s": 2.0}
    assert update == {"kind": "memory", **RUN, "step": 0, "rank": 0}
    assert failure == {"kind": "failure", **RUN, "error": "why"}
    assert verl_log.rows(tmp_path / "nothing", RUN, None) == []
    assert verl_log.summary([step, failure]).splitlines() == [
        "step 1: reward 0.5, step_s 2",
        "why",
    ]


def stamped(rows: Rows) -> Rows:
    names = ("device", "date", "commit", "sglang", "torch", "transformers", "verl", "ray")
    environment = {"kind": "environment", "bucket_bytes": 64 * MIB, **dict.fromkeys(names, "x")}
    return [environment, *rows]
