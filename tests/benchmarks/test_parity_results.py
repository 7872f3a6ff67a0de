"""From a study's folder to the result file, and the recorded verdict."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parity import picture, summary, tables, verdict
from benchmarks.parity.arms import ARMS
from benchmarks.parity.models import MODELS
from benchmarks.parity.run_log import FINISHED, HELD_OUT, LOG, rows_of
from benchmarks.parity.settings import ALPHA, ENVIRONMENT, MARGIN
from benchmarks.parity.summary import RESULTS

STEPS = 30
ALARM = {"metric": "mismatch_kl_k3", "value": 0.5, "threshold": 0.1, "message": "Look at it."}
NOISE = {"fp8": (0.004, -0.006, 0.002), "fp8-uncorrected": (-0.1, -0.1, -0.1)}
REWARDS = (0.80, 0.81, 0.82)


def write_run(state: Path, arm: str, seed: int, is_timed: bool = False) -> Path:
    """A finished run's folder."""
    folder = (state / "timing" if is_timed else state) / f"{arm}-{seed}"
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = [
        {"kind": "run", "arm": arm, "seed": seed, "parameters": 7},
        {"kind": "engine", "step": 0, "matrices": 34, "fp8_matrices": 32},
    ]
    for step in range(STEPS):
        row = {
            "reward": step / STEPS,
            "mismatch_kl_k3": 1e-4 * (step + 1),
            "ess": 1 - 1e-4 * step,
            "logprob_abs_diff_max": 0.5,
            "entropy": 0.9 - 0.01 * step + 0.1 * seed,
            "response_tokens": 100.0,
            "unfinished": 0.0,
            "tokens": 12800.0,
            "update_s": 0.01,
            "rollout_s": 0.5 if step >= summary.WARM_UP else 99.0,
            "learn_s": 0.25,
            "alarms": [ALARM] if ARMS[arm].must_alarm and step > 1 else [],
        }
        rows.append({"kind": "step", "step": step, **row})
    rows.append({"kind": "evaluation", "step": STEPS, "reward": 0.75})
    (folder / LOG).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / FINISHED).touch()
    reward = REWARDS[seed] + NOISE.get(arm, (0.0,) * 3)[seed]
    if not is_timed:
        (folder / HELD_OUT).write_text(json.dumps({"reward": reward}))
    return folder


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A study of some arms."""
    options = {"steps": STEPS, "prompts": 16, "group": 8, "held_out_problems": 4096}
    facts = {"device": "NVIDIA H200", "versions": {"sglang": "0.5.17"}, "commit": "abc1234"}
    environment = facts | {"date": "2026-01-01T00:00", "options": options}
    (tmp_path / ENVIRONMENT).write_text(json.dumps(environment))
    for arm in ("bf16", *NOISE):
        for seed in range(3):
            write_run(tmp_path, arm, seed)
    write_run(tmp_path, "outliers-kv8-unit", 0)
    write_run(tmp_path, "fp8", 0, is_timed=True)
    return tmp_path


def test_a_row_of_a_run_is_what_its_log_says(state: Path) -> None:
    rows = summary.summarize(state)
    [run] = [r for r in rows if (r["kind"], r.get("arm"), r.get("seed")) == ("run", "fp8", 1)]
    assert run["last_reward"] == pytest.approx(19.5 / STEPS, abs=1e-4)  # of steps 10 to 29
    assert run["held_out"]["reward"] == pytest.approx(0.804)
    assert run["series"]["mismatch_kl_k3"][-1] == 1e-4 * STEPS
    assert "clipped_fraction" not in run["series"]
    assert run["alarms"] == {}
    [broken] = [r for r in rows if r.get("arm") == "outliers-kv8-unit"]
    fired = broken["alarms"]["mismatch_kl_k3"]
    assert (fired["count"], fired["first_step"], fired["value"]) == (STEPS - 2, 2, 0.5)
    [timing] = [r for r in rows if r["kind"] == "timing"]
    assert timing["step_s"] == {"median": 0.76, "min": 0.76, "max": 0.76}  # without the first
    assert timing["tokens_per_s"]["median"] == 25600


def test_runs_that_are_not_finished_or_not_evaluated_are_apart(state: Path, tmp_path: Path) -> None:
    (state / "fp8-1" / FINISHED).unlink()
    log = state / "fp8-1" / LOG
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:12]) + '{"kind": "st')
    (state / "fp8-2" / HELD_OUT).unlink()
    rows = summary.summarize(state)
    found = [row for row in rows if row["kind"] == "unevaluated"]
    assert [(row["arm"], row["seed"], row["steps"]) for row in found] == [
        ("fp8", 1, 10),
        ("fp8", 2, STEPS),
    ]
    assert len(found[0]["series"]["mismatch_kl_k3"]) == 10
    assert not any("held_out" in row for row in found)
    picture.draw(rows, tmp_path / "parity.png")
    runs = [row for row in rows if row["kind"] == "run"]
    assert [run["seed"] for run in runs if run["arm"] == "fp8"] == [0]
    assert len(verdict.comparisons(runs)["fp8"].differences) == 1  # only seed 0 has a pair


def test_the_verdict_follows_the_rewards(state: Path) -> None:
    rows = summary.summarize(state)
    found = verdict.comparisons(rows)
    same, worse = found["fp8"], found["fp8-uncorrected"]
    assert same.mean == pytest.approx(0.0, abs=1e-12)
    assert same.p_tost is not None and same.p_tost < ALPHA
    assert worse.mean == pytest.approx(-0.1)
    assert worse.p_tost is not None and worse.p_tost > 0.99
    assert "| fp8 minus bf16 | 3 | 0.000 | -0.009 to +0.009 | yes |" in tables.tests(rows)


def test_alarms_that_were_not_expected_are_reported(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def expected() -> dict[str, str]:
        lines = tables.alarms(summary.summarize(state)).split("\n\n")[0].splitlines()[2:]
        return {line.split(" ")[1]: line.split(" ")[-2] for line in lines}

    assert set(expected().values()) == {"yes"}
    for arm in ("bf16", "outliers-kv8-unit"):
        swapped = replace(ARMS[arm], must_alarm=not ARMS[arm].must_alarm)
        monkeypatch.setitem(ARMS, arm, swapped)
    no = {arm for arm, found in expected().items() if found == "no"}
    assert no == {"bf16", "outliers-kv8-unit"}


def test_the_picture_is_drawn(state: Path, tmp_path: Path) -> None:
    picture.draw(summary.summarize(state), tmp_path / "parity.png")
    assert (tmp_path / "parity.png").stat().st_size > 20_000


@pytest.mark.parametrize(
    ("less", "seeds", "sentence"),
    [
        (0.001, 3, "; the same within 0.05 (TOST, largest p < 0.001, pairs of seeds: 3;"),
        (0.06, 3, "; not shown to be the same within 0.05 (TOST, largest p = 1.000, pairs of"),
        (0.001, 1, "; not shown to be the same within 0.05 (TOST, largest p = 1.000, pairs of"),
    ],
)
def test_the_line_of_readme_says_same_only_where_a_test_does(
    state: Path, less: float, seeds: int, sentence: str
) -> None:
    environment = summary.summarize(state)[0] | {"parameters": {"dense": 2e6, "moe": 3e6}}
    rewards = {"bf16": 0.9, "fp8": 0.9, "fp8-kv8": 0.9 - less, "moe-bf16": 0.8, "moe-fp8": 0.8}
    runs = [
        {"kind": "run", "arm": arm, "seed": seed, "held_out": {"reward": reward + 0.001 * seed}}
        for arm, reward in rewards.items()
        for seed in range(seeds)
    ]
    line = verdict.learning([environment, *runs])
    assert sentence in line


# ---- what was recorded ---------------------------------------------------------------------------


def test_the_recorded_study_is_whole_and_equivalent_within_the_margin() -> None:
    stats = pytest.importorskip("scipy.stats")
    rows = rows_of(RESULTS)
    runs = [row for row in rows if row["kind"] == "run"]
    rewards = verdict.held_out_rewards(rows)
    arms = {arm.name: arm for arm in ARMS.values() if arm.model in MODELS}
    assert {arm: len(seeds) for arm, seeds in rewards.items()} == {
        name: 1 if arm.planted else 3 for name, arm in arms.items()
    }
    assert all(len(run["series"]["reward"]) == 150 for run in runs)
    for arm in verdict.FP8_ARMS.keys() & arms:
        pairs = rewards[arm], rewards[ARMS[arm].reference or ""]
        differences = [pairs[0][seed] - pairs[1][seed] for seed in range(3)]
        assert stats.ttest_1samp(differences, MARGIN, alternative="less").pvalue < ALPHA
        assert stats.ttest_1samp(differences, -MARGIN, alternative="greater").pvalue < ALPHA
    assert {run["arm"] for run in runs if run["alarm_steps"]} == {"outliers-kv8-unit"}
