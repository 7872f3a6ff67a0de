"""One run: learning in parts, planted outliers, and a curve that a kill does not change."""

import math
import random
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import environment
from benchmarks.parity import learner, models, run, sampling, tasks
from benchmarks.parity.arms import ARMS
from benchmarks.parity.learner import Learner
from benchmarks.parity.run_log import FINAL, FINISHED, LOG, rows_of
from benchmarks.parity.settings import open_study
from examples.grpo import arithmetic
from trainer_bridge import Rollout

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


def a_batch(problems: list[tasks.Problem], n: int, seed: str) -> Rollout:
    """What the teacher would respond, with made-up logprobs."""
    rng = random.Random(seed)
    repeated = [problem for problem in problems for _ in range(n)]
    shown = [tasks.demonstrate(problem, rng)[: tasks.MAX_NEW_TOKENS] for problem in repeated]
    tokens = [arithmetic.encode(text) for text in shown]
    return Rollout(
        prompt_tokens=[arithmetic.encode(problem.prompt) for problem in repeated],
        tokens=tokens,
        logprobs=[[-rng.random() * 6 for _ in row] for row in tokens],
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
    rewards_PG = torch.tensor(sampling.rewards_of(tasks.WORKED_OUT, problems, batch)).view(3, 4)
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
    facts: dict[str, Any] = {"seeds": [], "kill_at": None, "versions": []}
    monkeypatch.setenv(environment.COMMIT_VARIABLE, COMMIT)

    @contextmanager
    def running_engine(
        checkpoint: Path, ignored: str, seed: int, keywords: dict[str, Any]
    ) -> Iterator[str]:
        facts["seeds"].append(seed)
        yield "engine"

    class Client:
        def control(self, message: dict[str, str], timeout_s: float = 9.0) -> dict[str, Any]:
            return {"layers": [{"format": "fp8"}, {"format": "bf16"}]}

    class Updated:
        seconds = {"total": 0.5}  # noqa: RUF012

    def update(model: Any, engine: str, version: int) -> Updated:
        facts["versions"].append(version)
        return Updated()

    def respond(
        engine: str, task: tasks.Task, problems: list[tasks.Problem], version: int, n: int = 1
    ) -> Rollout:
        if n > 1 and version == facts["kill_at"]:
            raise Killed
        return a_batch(problems, n, f"version {version}")

    monkeypatch.setattr(run, "running_engine", running_engine)
    monkeypatch.setattr(run, "connect", lambda engine: Client())
    monkeypatch.setattr(run, "update", update)
    monkeypatch.setattr(sampling, "respond", respond)
    return facts


def go_on(state: Path, until: float = math.inf, **settings: Any) -> bool:
    args = Namespace(state=state, size="tiny", settings=SMALL | settings)
    return run.run(open_study(args), ARMS["fp8"], 1, until)


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
    monkeypatch.setenv(environment.COMMIT_VARIABLE, "def5678")
    with pytest.raises(ValueError, match="a study with other commit; give the same"):
        go_on(tmp_path, **engine)
    # The control: what was refused has left the run as it was, and the same options go on.
    monkeypatch.setenv(environment.COMMIT_VARIABLE, COMMIT)
    assert go_on(tmp_path, **engine)
    rows = rows_of(tmp_path / "fp8-1" / LOG)
    assert [row["step"] for row in rows if row["kind"] == "engine"] == [0, EVERY]
    assert rows[0]["engine"]["page_size"] == 16
