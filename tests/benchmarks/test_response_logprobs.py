"""The benchmark of ``response_logprobs`` on a CPU: its arms, and too little memory."""

from pathlib import Path

import pytest
import torch

from benchmarks import response_logprobs
from benchmarks.benchmark import Run
from tests.test_imports import loaded_by
from trainer_bridge.rollouts import chunks


def test_each_arm_of_each_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 8 * 4 * 512)  # eight tokens
    run = Run(tmp_path, tmp_path / "log", {"repeats": 2}, ("32x*",))
    (job,) = response_logprobs.BENCHMARK.jobs
    found = response_logprobs.measure(job.spec, run)
    arms = ["without head", "chunks", "chunks, entropies", "all logits"]
    assert [(m["arm"], m["case"]) for m in found] == [(arm, "32x256") for arm in arms]
    assert all(m["values"]["fits"] == [1.0] and len(m["values"]["step_ms"]) == 2 for m in found)
    assert 0 <= found[1]["values"]["logprob_abs_diff_max"][0] < 0.1


def test_too_little_memory_is_measured() -> None:
    def step() -> None:
        raise torch.cuda.OutOfMemoryError("of 139 GiB")

    model = torch.nn.Linear(1, 1)
    values = response_logprobs.times(model, step, torch.device("cpu"), 1)
    assert values == {"fits": [0.0]}


def test_no_engine_is_loaded() -> None:
    assert "sglang" not in loaded_by("import benchmarks.response_logprobs")
