"""One run: learning in parts, planted outliers, and a curve that a kill does not change."""

import math
import random
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import environment
from benchmarks.learning import learner, results, run, sampling, study, tasks
from benchmarks.learning.learner import Learner
from benchmarks.learning.run import FINAL, FINISHED, only_writer, rows_of
from benchmarks.learning.study import ARMS, CONTROL, LOG, REFERENCE, Arm, open_study
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
        groups=[row // n for row in range(len(tokens))],
    )


def a_learner(seed: int = 0) -> Learner:
    return Learner(study.build("tiny", seed), 1e-3)


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
        cut = batch.micro_batches(limit)
        assert sorted(i for micro_batch in cut for i in micro_batch) == list(range(12))
        assert (len(cut) > 2) == (limit == 600)
        correction, norms[limit] = learner.learn(a_learner(), batch, rewards_PG, preset)
        assert correction.metrics["tokens"] == sum(map(len, batch.tokens))
    assert norms[600] == pytest.approx(norms[100_000], rel=NOISE)
    # The control: correction changes the gradient.
    other = "disabled" if preset != "disabled" else "decoupled_token_is"
    _, corrected = learner.learn(a_learner(), batch, rewards_PG, other)
    assert corrected != pytest.approx(norms[600], rel=0.1)


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the run's own code comes after it."""


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Engines that respond as the teacher does, each policy version in its own way."""
    facts: dict[str, Any] = {"kill_at": None, "seeds": [], "versions": [], "sent": []}
    monkeypatch.setenv(environment.COMMIT_VARIABLE, COMMIT)
    layers = [{"format": "block-fp8"}, {"format": "bf16"}]
    client = SimpleNamespace(control=lambda message: {"layers": layers})

    @contextmanager
    def engine_of(of: study.Study, arm: Arm, seed: int, **keywords: Any) -> Iterator[object]:
        facts["seeds"].append(seed)
        yield object()

    def update(sent: Any, engine: object, version: int) -> Any:
        facts["versions"].append(version)
        named = sent.named_parameters() if isinstance(sent, torch.nn.Module) else sent
        facts["sent"].append({name: weight.detach().clone() for name, weight in named})
        return SimpleNamespace(seconds={"total": 0.5})

    def respond(
        engine: object, task: tasks.Task, problems: list[tasks.Problem], version: int, n: int = 1
    ) -> Rollout:
        if n > 1 and version == facts["kill_at"]:
            raise Killed
        batch = a_batch(problems, n, f"version {version}")
        return replace(batch, versions=[[version] * len(row) for row in batch.tokens])

    monkeypatch.setattr(sampling, "engine_of", engine_of)
    monkeypatch.setattr(sampling, "respond", respond)
    monkeypatch.setattr(run, "update", update)
    monkeypatch.setattr(run, "connect", lambda engine: client)
    return facts


def go_on(state: Path, until: float = math.inf, arm: str = "fp8-tis", **settings: Any) -> bool:
    args = Namespace(state=state, size="tiny", settings=SMALL | settings)
    return run.run(open_study(args), ARMS[arm], 1, until)


def curve(state: Path) -> list[dict[str, Any]]:
    """What a kill must not change."""
    rows = rows_of(state / "fp8-tis-1" / LOG)
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
    (cut / "start").symlink_to(whole / "start")

    fake_engine["kill_at"] = kill_at
    with pytest.raises(Killed):
        go_on(cut)
    folder = cut / "fp8-tis-1"
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
    for first in results.POSITIONS[:2]:  # where a batch has tokens
        assert any(row.get(f"position_{first}/mismatch_kl_k3", 0.0) > 0 for row in steps)
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
    folder = tmp_path / "fp8-tis-1"
    with only_writer(folder):
        (folder / LOG).write_text('{"step": 0}\n')
        with pytest.raises(RuntimeError, match="another process goes on with the run in"):
            go_on(tmp_path)
        assert (folder / LOG).read_text() == '{"step": 0}\n'
    assert go_on(tmp_path)


def test_what_the_control_is_sent_is_off(tmp_path: Path, fake_engine: dict[str, Any]) -> None:
    """The reference's engine gets the trainer's own weights."""
    for arm in (REFERENCE, CONTROL):
        assert go_on(tmp_path, arm=arm, steps=1)
    weights, _, off, _ = fake_engine["sent"]
    assert off.keys() == weights.keys()
    seen = set()
    for name, weight in weights.items():
        factors = {round(factor, 2) for factor in (off[name] / weight).flatten().tolist()}
        assert factors <= ({0.67, 1.5} if "_proj" in name else {1.0}), name
        seen |= factors
    assert seen == {0.67, 1.0, 1.5}


def test_a_study_has_the_same_settings_and_commit_throughout(
    tmp_path: Path, fake_engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps may change until the first run begins."""
    (tmp_path / "fp8-tis-1").mkdir()

    def opened(**settings: Any) -> study.Study:
        args = Namespace(state=tmp_path, size="tiny", settings=SMALL | settings)
        return open_study(args)

    assert [opened(steps=n).settings.steps for n in (2, 3)] == [2, 3]
    (tmp_path / "fp8-tis-1" / LOG).touch()
    monkeypatch.setenv(environment.COMMIT_VARIABLE, "def5678")
    with pytest.raises(ValueError, match="a study with other commit, rate, steps; give the same"):
        opened(steps=2, rate=1.0)
    monkeypatch.setenv(environment.COMMIT_VARIABLE, COMMIT)
    assert opened(steps=3).settings.steps == 3  # the control
