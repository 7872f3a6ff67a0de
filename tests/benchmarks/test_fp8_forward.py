"""The benchmark of ``fp8_forward`` on a CPU: what it measures, and that it needs no engine."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import fp8_forward
from benchmarks.benchmark import Run
from sgl_fp8rl.ops import block_linear
from tests.test_imports import loaded_by

OPTIONS = {"layers": 1, "repeats": 1}


@pytest.mark.parametrize("job", fp8_forward.BENCHMARK.jobs, ids=lambda job: job.name)
def test_bf16_beside_codes(job: Any, tmp_path: Path) -> None:
    spec = job.spec
    found = fp8_forward.measure(spec, Run(tmp_path, tmp_path / "log", OPTIONS))
    cases = [f"{sequences}x{length}" for sequences, length in spec.batches]
    arms = ["bf16", "fp8_forward, reference"]
    assert [(m["arm"], m["case"]) for m in found] == [(a, c) for a in arms for c in cases]
    for measurement in found:
        values = measurement["values"]
        assert {"step_ms", "checkpointed_step_ms"} <= values.keys() or "pass_ms" in values
        assert ("quantize_ms" in values) is (measurement["arm"] != "bf16")


def test_codes_change_what_is_computed() -> None:
    device, shape = torch.device("cpu"), fp8_forward.TINY["qwen3-8b"]
    model = fp8_forward.trainer_of(shape, device).eval()
    ids = fp8_forward.tokens(1, 32, shape.vocab, device)
    with torch.no_grad():
        before = fp8_forward.logprobs(model, ids)
        fp8_forward.convert(model, shape)
        assert 0 < (fp8_forward.logprobs(model, ids) - before).abs().mean() < 0.2


def test_a_product_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = fp8_forward.TINY["qwen3-8b"]
    linear = block_linear.linear
    monkeypatch.setattr(block_linear, "linear", lambda x, *codes: linear(x, *codes) * 1.1)
    with pytest.raises(RuntimeError, match="is off by"):
        fp8_forward.check(shape, 32, torch.device("cpu"))


def test_no_engine_is_loaded() -> None:
    assert "sglang" not in loaded_by("import benchmarks.fp8_forward")
