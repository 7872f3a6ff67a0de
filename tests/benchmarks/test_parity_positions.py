"""The mismatch by position and kind of problem: what is measured, and its table."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.parity import engines, jobs, long_tables, models, positions, run_all, sampling
from benchmarks.parity.arms import Arm
from benchmarks.parity.learner import trainer_logprobs
from benchmarks.parity.run_log import rows_of
from benchmarks.parity.settings import OF_STUDY, SIZES, Study
from benchmarks.parity.summary import summarize
from benchmarks.parity.tasks import KINDS, LONG
from examples.grpo import arithmetic
from sgl_fp8rl.ports import Port
from tests.benchmarks.test_parity_engine import finish, start
from trainer_bridge import Rollout

SETTINGS = replace(SIZES["tiny"], **OF_STUDY["long"] | {"position_problems": 3})
NOISE = 1e-5  # of k3, in FP32; 1.9e-6 was measured
EARLY, LATE = 0.1, 0.3  # by which a fake engine's logprobs are off, and from token 256 on
CPU = torch.device("cpu")


@pytest.fixture
def study(tmp_path: Path) -> Study:
    study = Study(tmp_path, "tiny", SETTINGS, CPU, "long")
    models.save(models.build("dense", "tiny", 0), study.start_folder("dense"))
    return study


class FakeEngine:
    """Responds with what the policy would never say, to the problems that it is given."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def update(self, model: Any, version: int) -> float:
        self.model = model
        return 0.0

    def sample(
        self, prompts: list[list[int]], options: dict[str, Any], version: int | None
    ) -> Rollout:
        self.asked += [arithmetic.decode(prompt) for prompt in prompts]
        tokens = [arithmetic.encode("ab" * 150) for _ in prompts]
        given = {"versions": [[0] * 300] * len(prompts), "finish_reasons": ["stop"] * len(prompts)}
        unknown = [[0.0] * 300] * len(prompts)
        batch = Rollout(prompts, tokens, unknown, temperature=1.0, **given)
        found_BT = trainer_logprobs(self.model, batch)
        found_BT[:, :256] -= EARLY
        found_BT[:, 256:] -= LATE
        return replace(batch, logprobs=found_BT.tolist())


def test_late_tokens_have_their_own_mismatch(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()

    @contextmanager
    def running(arm: Arm, *_: Any) -> Iterator[FakeEngine]:
        assert arm.engine["kv_cache_dtype"] == "fp8_e4m3" and arm.has_bf16_engine
        yield engine

    monkeypatch.setattr(engines, "running", running)
    rows = positions.measure(study, "dense", 0, "bf16-kv8")
    assert [row["problems"] for row in rows] == list(KINDS)
    per_kind = SETTINGS.position_problems * positions.PARTS
    assert [prompt[0] for prompt in engine.asked] == [k for k in "TSP" for _ in range(per_kind)]
    for row in rows:
        for first, off in (("16", EARLY), ("64", EARLY), ("256", LATE)):
            expected = [math.exp(off) - 1 - off] * positions.PARTS
            assert row["mismatch_kl_k3"][first] == pytest.approx(expected, rel=NOISE)
            assert row["logprob_abs_diff_mean"][first] == pytest.approx([off] * 4, rel=NOISE)

    path = positions.path_of(study, "dense", 0, "bf16-kv8")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (study.state / "environment.json").write_text('{"date": "2026-01-01T00:00:00"}')
    table = long_tables.by_position(summarize(study.state))
    (line,) = [line for line in table.splitlines() if "| bf16-kv8 | sort |" in line]
    assert "| 5.0e-02 (5.0e-02 to 5.0e-02) | 9.6 | 0.1 and 0.3 |" in line


def test_problems_are_of_the_highest_level(study: Study) -> None:
    task = sampling.task_of("dense", study.start_folder("dense"), SETTINGS.levels)
    found = positions.problems_of(task, SETTINGS)
    assert list(found) == list(KINDS)
    for kind, problems in found.items():
        assert {(problem.kind, problem.level) for problem in problems} == {(kind, LONG)}
        assert len({problem.prompt for problem in problems}) == 3 * positions.PARTS
    with pytest.raises(ValueError, match="position_problems"):
        positions.problems_of(task, replace(SETTINGS, position_problems=0))


def test_jobs_share_the_engines_after_the_runs(study: Study) -> None:
    words = ["--study", "long", "--state", str(study.state), "--gpus", "0,1", "--seeds", "2"]
    made = {job.name: job for job in jobs.jobs_of(study, run_all.arguments(words))}
    mine = [made[f"positions-dense-{share}"] for share in (1, 2)]
    assert [path for job in mine for path in job.makes] == [
        positions.path_of(study, "dense", 0, name) for name in positions.ENGINES
    ]
    runs = tuple(
        name for name, job in made.items() if name.endswith("-0") and "--arm" in job.command
    )
    assert len(runs) == 4 and all(job.after == runs for job in mine)
    assert sum(name.startswith("positions") for name in made) == 2  # of the first seed alone


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.timeout(1200)
def test_fp8_has_more_mismatch_on_real_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8RL_COMMIT", "abc1234")
    port = Port()
    settings = {
        "demonstrations": 10,
        "demonstration_batch": 4,
        "levels": [1],
        "position_problems": 2,
        "engine_args": {"nccl_port": port.number},
    }
    finish(start("start", tmp_path, "--model", "dense", settings=settings), tmp_path)
    finish(start("positions", tmp_path, "--model", "dense", settings=settings), tmp_path)
    k3 = {}
    for name in positions.ENGINES:
        rows = rows_of(tmp_path / "start-dense" / f"{positions.POSITIONS}{name}.jsonl")
        assert [row["problems"] for row in rows] == list(KINDS)
        k3[name] = sum(sum(row["mismatch_kl_k3"]["16"]) for row in rows)
    assert 0 < k3["bf16"] < min(k3["bf16-kv8"], k3["fp8"])
    assert k3["fp8-kv8"] > k3["bf16"]
