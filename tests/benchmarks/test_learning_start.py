"""The models of the study, and the weights that its runs begin with."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.learning import start, study, tasks
from benchmarks.learning.study import SIZES, Study

CPU = torch.device("cpu")
SMALL = replace(SIZES["tiny"], demonstrations=3, demonstration_batch=4)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_the_start_is_made_once_and_repeats_by_its_seed(tmp_path: Path) -> None:
    first, second = (Study(tmp_path / n, "tiny", SMALL, CPU) for n in ("a", "b"))
    other = Study(tmp_path / "c", "tiny", replace(SMALL, start_seed=1), CPU)
    for each in (first, second, other):
        start.make(each)
    assert [path.name for path in first.state.iterdir()] == ["start"]
    mine, again, changed = (weights_of(each.start) for each in (first, second, other))
    assert all(torch.equal(mine[name], again[name]) for name in mine)
    assert not torch.equal(mine["lm_head.weight"], changed["lm_head.weight"])
    assert not torch.are_deterministic_algorithms_enabled()
    before = study.build("tiny", 0).state_dict()["lm_head.weight"]
    assert not torch.equal(mine["lm_head.weight"], before.bfloat16())
    at = (first.start / "model.safetensors").stat().st_mtime_ns
    start.make(first)
    assert (first.start / "model.safetensors").stat().st_mtime_ns == at


ROUNDED = 1e-5
"""Between weights in BF16 of one rank and of two, as a part of what was learned. Healthy: 8e-7."""


@pytest.mark.timeout(180)
def test_ranks_train_together_what_one_trains(tmp_path: Path) -> None:
    settings = {"demonstrations": 3, "demonstration_batch": 5, "levels": [3, tasks.LONG]}
    module = ["benchmarks.learning.start", "--size", "tiny"]
    module += ["--state", str(tmp_path / "two"), "--settings", json.dumps(settings)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run([*torchrun, "--nproc-per-node", "2", "-m", *module], check=True, timeout=170)
    alone = Study(tmp_path / "one", "tiny", replace(SMALL, **settings), CPU)
    start.make(alone)
    two, one = weights_of(tmp_path / "two" / "start"), weights_of(alone.start)
    before = study.build("tiny", 0).state_dict()
    apart = sum((two[name].float() - one[name].float()).abs().sum() for name in one)
    learned = sum((before[name] - one[name].float()).abs().sum() for name in one)
    assert apart < ROUNDED * learned


def test_the_start_ends_at_the_reward_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "LONGEST", dict.fromkeys(tasks.LEVELS, 40))
    found: list[float] = []
    true_reward = start.reward_of

    def reward_of(model: Any, count: int, levels: list[int]) -> float:
        assert (count, levels) == (SMALL.evaluation_problems, SMALL.levels)
        assert true_reward(model, count, levels) == 0  # so early
        found.append(0.1 * (len(found) + 1))
        return found[-1]

    monkeypatch.setattr(start, "reward_of", reward_of)
    small = replace(SMALL, demonstrations_every=2)
    start.train("tiny", replace(small, demonstrations=9, start_reward=0.2), CPU)
    assert found == [0.1, 0.2]
    found.clear()
    start.train("tiny", replace(small, demonstrations=5, start_reward=0.8), CPU)
    assert found == [0.1, 0.2]  # demonstrations were at an end
    found.clear()
    with pytest.raises(ValueError, match=r"solves 0\.200 .* has to solve 0\.210"):
        start.train("tiny", replace(small, demonstrations=5, start_reward=0.84), CPU)
