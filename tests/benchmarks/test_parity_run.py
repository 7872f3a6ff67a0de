"""One run: learning in parts, planted outliers, and a curve that a kill does not change."""

import json
import math
import random
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from threading import Semaphore
from typing import Any

import pytest
import torch

from benchmarks import environment
from benchmarks.parity import engines, learner, models, run, run_all, sampling, tasks
from benchmarks.parity.arms import Arm
from benchmarks.parity.controlled import Controlled
from benchmarks.parity.dose_arms import ALL_ARMS, DOSE_ARMS, MINI_BATCHES, STUDIES
from benchmarks.parity.learner import Learner
from benchmarks.parity.run_log import FINAL, FINISHED, LOG, only_writer, rows_of
from benchmarks.parity.scan import SCAN
from benchmarks.parity.settings import open_study
from examples.grpo import arithmetic
from trainer_bridge import Request, Rollout

STEPS, EVERY = 6, 2
COMMIT = "abc1234"  # of the tree, which may change while the tests run
SMALL = {
    "steps": STEPS,
    "demonstrations": 3,
    "demonstration_batch": 2,
    "prompts": 2,
    "group": 4,
    "evaluation_problems": 4,
    "evaluate_every": EVERY,
    "checkpoint_every": EVERY,
}
NOISE = 1e-6  # of a gradient's norm, passes of other lengths; 0.0 was measured


def a_batch(problems: list[tasks.Problem], n: int, seed: str, off: float = 6.0) -> Rollout:
    """What the teacher would respond, with made-up logprobs down to ``-off``."""
    rng = random.Random(seed)
    repeated = [problem for problem in problems for _ in range(n)]
    longest = tasks.max_new_tokens(tasks.LEVELS)
    shown = [tasks.demonstrate(problem, rng)[:longest] for problem in repeated]
    tokens = [arithmetic.encode(text) for text in shown]
    return Rollout(
        prompt_tokens=[arithmetic.encode(problem.prompt) for problem in repeated],
        tokens=tokens,
        logprobs=[[-rng.random() * off for _ in row] for row in tokens],
        versions=[[0] * len(row) for row in tokens],
        finish_reasons=["stop"] * len(tokens),
        temperature=1.0,
    )


def a_learner(seed: int = 0) -> Learner:
    return Learner(models.build("dense", "tiny", seed), 1e-3)


# ---- learning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["decoupled_token_is", "disabled"])
def test_learning_in_micro_batches_is_learning_from_the_whole_batch(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = tasks.draw_problems(3, "a")
    batch = a_batch(problems, 4, "b")
    rewards_PG = torch.tensor(sampling.rewards_of(tasks.worked_out(), problems, batch)).view(3, 4)
    rewards_PG[0] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    norms = {}
    for limit in (600, 100_000):
        monkeypatch.setattr(learner, "TOKENS_PER_PASS", limit)
        cut = list(learner.micro_batches_of(batch.prompt_tokens, batch.tokens))
        assert sorted(i for micro_batch in cut for i in micro_batch) == list(range(12))
        assert (len(cut) > 2) == (limit == 600)
        correction, norms[limit] = learner.learn(a_learner(), batch, rewards_PG, preset)
        assert correction.metrics["tokens"] == sum(map(len, batch.tokens))
    assert norms[600] == pytest.approx(norms[100_000], rel=NOISE)
    # The control: correction changes the gradient.
    other = "disabled" if preset != "disabled" else "decoupled_token_is"
    _, corrected = learner.learn(a_learner(), batch, rewards_PG, other)
    assert corrected != pytest.approx(norms[600], rel=0.1)


def test_the_state_is_all_that_a_step_depends_on() -> None:
    problems = tasks.draw_problems(1, "a")
    batch, rewards_PG = a_batch(problems, 4, "b"), torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    first, second = a_learner(0), a_learner(1)
    learner.learn(first, batch, rewards_PG, "disabled")
    kept = {name: tensor.clone() for name, tensor in first.state().items()}
    norms = [learner.learn(first, batch, rewards_PG, "disabled")[1]]
    second.restore(kept)
    norms.append(learner.learn(second, batch, rewards_PG, "disabled")[1])
    assert norms[0] == norms[1]
    ours, theirs = first.state(), second.state()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for name, parameter in first.model.named_parameters():
        assert torch.equal(parameter, ours[f"weight.{name}"]), name


# ---- a run ---------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the run's own code comes after it."""


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Engines that respond as the teacher does, each policy version in its own way."""
    lists = ("seeds", "versions", "in_flight", "ignored", "kv")
    facts: dict[str, Any] = {"kill_at": None, "off": 6.0, **{name: [] for name in lists}}
    begun = Semaphore(0)
    """Rollouts that an update is to interrupt, and that have begun."""
    monkeypatch.setenv(environment.COMMIT_VARIABLE, COMMIT)

    class FakeEngine:
        def formats(self) -> dict[str, str]:
            return {"model.layers.0.mlp.gate_up_proj": "block-fp8", "lm_head": "bf16"}

        def update(self, model: Any, version: int, in_flight: str = "abort") -> float:
            if in_flight == "retract":
                assert begun.acquire(timeout=60), "no rollout is under way"
            facts["versions"].append(version)
            facts["in_flight"].append(in_flight)
            return 0.5

    @contextmanager
    def running(
        arm: Arm, checkpoint: Path, ignored: str, seed: int, keywords: dict[str, Any]
    ) -> Iterator[FakeEngine]:
        facts["seeds"].append(seed)
        facts["ignored"].append(ignored)
        facts["kv"].append(keywords.get("kv_cache_dtype"))
        yield FakeEngine()

    def respond(
        engine: Any,
        task: tasks.Task,
        problems: list[tasks.Problem],
        version: int | None,
        n: int = 1,
    ) -> Rollout:
        if n > 1 and version == facts["kill_at"] is not None:
            raise Killed
        sampled_by = version
        if version is None:
            sampled_by = facts["versions"][-1]
            begun.release()
        batch = a_batch(problems, n, f"version {version}", facts["off"])
        return replace(batch, versions=[[sampled_by] * len(row) for row in batch.tokens])

    monkeypatch.setattr(engines, "running", running)
    monkeypatch.setattr(sampling, "respond", respond)
    return facts


def go_on(
    state: Path, until: float = math.inf, arm: str = "fp8", study: str = "parity", **settings: Any
) -> bool:
    args = Namespace(state=state, size="tiny", study=study, settings=SMALL | settings)
    return run.run(open_study(args), ALL_ARMS[arm], 1, until)


def curve(state: Path) -> list[dict[str, Any]]:
    """What a kill must not change."""
    rows = rows_of(state / "fp8-1" / LOG)
    return [
        {key: value for key, value in row.items() if not key.endswith("_s")}
        for row in rows
        if row["kind"] in ("step", "evaluation")
    ]


@pytest.mark.parametrize("kill_at", [1, 4, 5])
def test_a_killed_run_goes_on_to_the_same_curve(
    tmp_path: Path, fake_engine: dict[str, Any], kill_at: int
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert go_on(whole)
    cut.mkdir()
    (cut / "start-dense").symlink_to(whole / "start-dense")

    fake_engine["kill_at"] = kill_at
    with pytest.raises(Killed):
        go_on(cut)
    folder = cut / "fp8-1"
    with (folder / LOG).open("a") as log:
        log.write('{"kind": "step", "step": 99')  # killed while it wrote
    (folder / "checkpoint.tmp").write_bytes(b"half")
    fake_engine["kill_at"] = None
    assert go_on(cut)

    assert curve(cut) == curve(whole)
    steps = [row for row in curve(cut) if row["kind"] == "step"]
    assert [row["step"] for row in steps] == list(range(STEPS))
    evaluated = [row["step"] for row in curve(cut) if row["kind"] == "evaluation"]
    assert evaluated == list(range(0, STEPS + 1, EVERY))
    # Learning went on: the trainer's policy is another one at each step.
    assert len({row["trainer_log_ppl"] for row in steps}) == STEPS
    resumed = kill_at // EVERY * EVERY
    assert fake_engine["seeds"][-1] == 1 + run.ENGINE_SEEDS * resumed
    assert (folder / FINAL / "model.safetensors").exists()
    assert (folder / FINISHED).exists()
    assert not list(folder.glob("checkpoint*.safetensors"))


def test_a_run_stops_with_a_checkpoint_when_its_time_is_up(
    tmp_path: Path, fake_engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 1.0, 2.0, 3.0])  # read before each step
    real = time.time
    monkeypatch.setattr(time, "time", lambda: next(clock))
    assert not go_on(tmp_path, until=2.5)
    assert [row["step"] for row in curve(tmp_path) if row["kind"] == "step"] == [0, 1, 2]
    monkeypatch.setattr(time, "time", real)
    assert not go_on(tmp_path, until=2.5)  # long past: it stops at once, and keeps what it has
    assert go_on(tmp_path)
    steps = [row["step"] for row in curve(tmp_path) if row["kind"] == "step"]
    assert steps == list(range(STEPS))
    assert fake_engine["versions"][-STEPS + 2 :] == [3, 4, 5, 6]


def test_a_log_has_one_writer(tmp_path: Path, fake_engine: dict[str, Any]) -> None:
    folder = tmp_path / "fp8-1"
    with only_writer(folder):
        (folder / LOG).write_text("what the other process wrote\n")
        with pytest.raises(RuntimeError, match="another process goes on with the run in"):
            go_on(tmp_path)
        assert (folder / LOG).read_text() == "what the other process wrote\n"
    assert go_on(tmp_path)


def test_a_study_has_the_same_settings_and_commit_throughout(
    tmp_path: Path, fake_engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: dict[str, Any] = {"engine_args": {"page_size": 16}}
    fake_engine["kill_at"] = 3
    with pytest.raises(Killed):
        go_on(tmp_path, **engine)
    fake_engine["kill_at"] = None
    for name, settings in {"rate": engine | {"rate": 1.0}, "engine_args": {}}.items():
        with pytest.raises(ValueError, match=f"a study with other {name}; give the same options"):
            go_on(tmp_path, **settings)
    with pytest.raises(ValueError, match="a study with other steps; give"):
        go_on(tmp_path, **engine, steps=STEPS - 1)
    monkeypatch.setenv(environment.COMMIT_VARIABLE, "def5678")
    with pytest.raises(ValueError, match="a study with other commit; give the same"):
        go_on(tmp_path, **engine)
    # The control: what was refused has left the run as it was, and the same options go on.
    monkeypatch.setenv(environment.COMMIT_VARIABLE, COMMIT)
    assert go_on(tmp_path, **engine)
    rows = rows_of(tmp_path / "fp8-1" / LOG)
    assert [row["step"] for row in rows if row["kind"] == "engine"] == [0, EVERY]
    assert rows[0]["engine"]["page_size"] == 16


def test_the_number_of_steps_may_be_chosen_after_the_start(tmp_path: Path) -> None:
    args = Namespace(state=tmp_path, size="tiny", study="long", settings=SMALL)
    open_study(args)
    fewer = Namespace(**{**vars(args), "settings": SMALL | {"steps": 2}})
    assert open_study(fewer).settings.steps == 2
    assert json.loads((tmp_path / "environment.json").read_text())["options"]["steps"] == 2
    args.settings = SMALL | {"steps": 2, "demonstrations": 4}
    with pytest.raises(ValueError, match="a study with other demonstrations; give"):
        open_study(args)


def test_a_second_execution_of_a_study_fills_the_tables_of_its_page(
    tmp_path: Path, fake_engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every job of seeds 2 and 3 in turn, then their rows beside those of the first execution."""
    names = "bf16", "5e-2-none", "5e-2-tis", "5e-2-mis", "1e-2-none", "1e-2-tis"
    monkeypatch.setitem(STUDIES, "doses", {name: DOSE_ARMS[name] for name in names})
    settings = SMALL | {"steps": 2, "exponents": [12, 13], "held_out_problems": 2}
    words = ["--study", "doses", "--size", "tiny", "--settings", json.dumps(settings)]
    words += ["--state", str(tmp_path / "doses"), "--first-seed", "2", "--seeds", "2"]
    args = run_all.arguments([*words, "--gpus", "0,1"])
    for job in run_all.jobs_of(open_study(args), args):
        assert all(path.exists() for path in job.needs), job.name
        monkeypatch.setattr(sys, "argv", [*job.command[2:]])
        with suppress(SystemExit):
            import_module(job.command[2]).main()
        assert job.is_done, job.name


# ---- what the study of doses adds ----------------------------------------------------------------


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in rows_of(folder / LOG) if row["kind"] == kind]


def test_several_steps_on_a_rollout_are_each_corrected_by_themselves(
    tmp_path: Path, fake_engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    step = Learner.step
    monkeypatch.setattr(Learner, "step", lambda self: counts.append(0) or step(self))
    assert go_on(tmp_path, arm="stale-bf16", study="doses", prompts=MINI_BATCHES, steps=2)
    demonstrations = SMALL["demonstrations"]
    assert len(counts) == demonstrations + 2 * MINI_BATCHES
    for row in rows(tmp_path / "stale-bf16-1", "step"):
        assert len(set(row["kl_of_parts"])) == MINI_BATCHES
        assert row["mismatch_kl_k3"] == pytest.approx(sum(row["kl_of_parts"]) / MINI_BATCHES)


def test_an_update_comes_while_the_next_rollout_runs(
    tmp_path: Path, fake_engine: dict[str, Any]
) -> None:
    assert go_on(tmp_path, arm="retract-bf16", study="doses", steps=4)
    assert fake_engine["in_flight"] == ["abort", *["retract"] * 3, "abort"]
    steps = rows(tmp_path / "retract-bf16-1", "step")
    assert [row["old_tokens"] for row in steps] == [0, 1, 1, 1]
    # the control: an arm that waits for its updates has none
    assert go_on(tmp_path, arm="bf16", study="doses", steps=4)
    assert {row["old_tokens"] for row in rows(tmp_path / "bf16-1", "step")} == {0}


def test_a_dose_grows_and_a_request_restarts_the_engine(
    tmp_path: Path, fake_engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: dict[str, Any] = {"study": "doses", "grows_after": 2, "doubles_every": 2}
    assert go_on(tmp_path, arm="bf16", **changed)
    scanned = {"exponent": 13, "every": 2, "mismatch_kl_k3": 1e-3}
    (tmp_path / "start-dense" / SCAN).write_text(json.dumps(scanned) + "\n")
    largest: list[float] = []
    asked: list[int] = []

    def observe(self: Controlled, metrics: dict[str, float]) -> tuple[str, ...]:
        asked.append(len(asked))
        if len(asked) != 3:
            return ()
        self._ask([Request("kv_cache_dtype", "bf16", "a fake reason")])
        return ("a fake reason",)

    def plant(self: Learner, gains: dict[str, torch.Tensor]) -> None:
        largest.append(max((gain.max().item() for gain in gains.values()), default=1.0))

    monkeypatch.setattr(Controlled, "observe", observe)
    monkeypatch.setattr(Learner, "plant", plant)
    for name in ("seeds", "kv"):
        fake_engine[name].clear()
    assert go_on(tmp_path, arm="grows-controlled", **changed)
    assert fake_engine["kv"] == ["fp8_e4m3", None]
    assert fake_engine["seeds"] == [1, 1 + 3 * run.ENGINE_SEEDS]
    # before each step, once more for each engine, and nothing in the weights that are evaluated
    exponents = [math.log2(gain) for gain in largest]
    assert exponents == [13, 13, 13, 14, 14, 14, 15, 15, 0]
    folder = tmp_path / "grows-controlled-1"
    assert [row["step"] for row in rows(folder, "decision")] == [2]
    assert [row["step"] for row in rows(folder, "step")] == list(range(STEPS))
