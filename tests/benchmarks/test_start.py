"""The start benchmark without a GPU: what is served, the log, and compiled kernels."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import start
from benchmarks.benchmark import Run
from benchmarks.engines import models
from benchmarks.environment import ROOT

AHEAD = "[2026-01-01 00:00:00] Compiled DeepGEMM kernels in 20.5 s\n"


BELOW = (
    "Capturing:   0%|          | 0/8 [00:00<?, ?it/s]\n"
    "\nDeepGEMM warmup:   0%|          | 0/130 [00:00<?, ?it/s]\x1b[A\n"
    "\nDeepGEMM warmup:  50%|#####     | 65/130 [00:00<00:00, 300.00it/s]\x1b[A\n"
    "DeepGEMM warmup: 100%|##########| 130/130 [00:00<00:00, 260.00it/s]\n"
)


ALONE = (
    "DeepGEMM warmup:   0%|          | 0/4 [00:00<?, ?it/s]\n"
    "DeepGEMM warmup: 100%|##########| 4/4 [00:09<00:00,  3.00s/it]\n"
    "DeepGEMM warmup: 100%|##########| 4/4 [00:09<00:00,  2.25s/it]\n"
)


def test_the_time_of_the_warm_up_in_a_log() -> None:
    assert start.deep_gemm_s(BELOW) == pytest.approx(0.5)
    assert start.deep_gemm_s(BELOW + ALONE) == pytest.approx(9.5)
    assert start.deep_gemm_s(AHEAD + BELOW + ALONE) == pytest.approx(30.0)
    failed = "Compiling DeepGEMM kernels side by side failed after 7.0 s, so they are compiled\n"
    assert start.deep_gemm_s(failed + BELOW) == pytest.approx(7.5)
    assert start.deep_gemm_s("all is well") is None
    assert start.deep_gemm_s(BELOW.partition("DeepGEMM warmup: 100%")[0]) is None


def test_the_log_lines_are_those_of_our_warm_up_and_of_tqdm() -> None:
    source = (Path(__file__).parents[2] / "sgl_fp8rl" / "gemm" / "warmup.py").read_text()
    assert '"Compiled DeepGEMM kernels in %.1f s"' in source
    assert '"Compiling DeepGEMM kernels side by side failed after %.1f s' in source
    pytest.importorskip("tqdm")
    bar = "from tqdm import tqdm; [n for n in tqdm(range(2500), desc='DeepGEMM warmup')]"
    drawn = subprocess.run([sys.executable, "-c", bar], capture_output=True, text=True, timeout=60)
    assert drawn.returncode == 0, drawn.stderr
    seconds = start.deep_gemm_s(drawn.stderr)
    assert seconds is not None and seconds > 0


def test_what_is_served() -> None:
    served = list(start.requests(random.Random(0)))
    assert served == list(start.requests(random.Random(0)))
    single = [lengths[0] for lengths, new in served if new == 1 and len(lengths) == 1]
    assert {1, 17, 31, 33, 65, 129, 193, 513, 4095, 4096} <= set(single)
    assert min(single) == 1 and max(single) == 4096
    batches = [len(lengths) for lengths, new in served if new == 6]
    assert batches == list(range(1, 41))
    assert max(batches) > start.GRAPHS  # some run without a captured graph
    lengths, _ = served[-1]
    assert sum(lengths) > 2 * start.ENGINE["chunked_prefill_size"]


class CompilingEngine:
    """Stands for ``sglang.Engine``: compiles as it starts, and at its longest prompt."""

    answers = 1.0

    def __init__(self, **keywords: Any) -> None:
        self.cache = Path(os.environ[start.CACHE_VARIABLE])
        config = json.loads((Path(keywords["model_path"]) / "config.json").read_text())
        assert config["num_hidden_layers"] == 2
        for name in "abc":
            self.compile(f"gemm.{name}")
        self.version: int | None = None if keywords["quantization"] == "fp8rl" else -1

    def compile(self, name: str) -> None:
        (self.cache / "cache" / f"kernel.{name}").mkdir(parents=True, exist_ok=True)

    def generate(
        self, input_ids: list[list[int]], sampling_params: dict[str, Any]
    ) -> list[dict[str, Any]]:
        assert self.version is not None, "quarantined"
        if len(input_ids[0]) == 4096:
            self.compile("transpose.d")
        new = int(sampling_params["max_new_tokens"] * self.answers)
        return [{"output_ids": [0] * new} for _ in input_ids]

    def shutdown(self) -> None:
        pass


def a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: start.Case, log: str
) -> dict[str, list[float]]:
    import trainer_bridge

    def take(module: Any, engine: CompilingEngine, version: int) -> None:
        assert sum(1 for _ in module.parameters()) == 2 * 11 + 3
        engine.version = version

    tiny = models.Shape(hidden=256, intermediate=384, layers=36, heads=2, kv_heads=1, vocab=512)
    monkeypatch.setitem(models.MODELS, start.MODEL, tiny)
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(Engine=CompilingEngine))
    monkeypatch.setattr(trainer_bridge, "update", take)
    monkeypatch.setattr(start, "DEVICE", "cpu")
    monkeypatch.setenv(start.CACHE_VARIABLE, "of the user")
    path = tmp_path / "log"
    path.write_text(log)
    run = Run(tmp_path, tmp_path, path, {"layers": 2, "graphs": 8})
    (measurement,) = start.measure(case, run)
    return measurement["values"]


def test_kernels_are_counted_where_they_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold, warm, stock = start.CASES
    found = a_start(tmp_path, monkeypatch, cold, AHEAD + BELOW)
    assert found["kernels_compiled"] == [3] and found["kernels_compiled_after_start"] == [1]
    assert found["deep_gemm_s"] == [21.0]
    for case, log in ((warm, BELOW), (stock, "")):
        found = a_start(tmp_path, monkeypatch, case, log)
        assert found["kernels_compiled"] == found["kernels_compiled_after_start"] == [0]


def test_a_warm_up_that_did_not_happen_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold, _, stock = start.CASES
    with pytest.raises(RuntimeError, match="the log has no warm-up"):
        a_start(tmp_path, monkeypatch, cold, "nothing")
    with pytest.raises(RuntimeError, match="the log has a warm-up"):
        a_start(tmp_path, monkeypatch, stock, BELOW)


def test_importing_the_benchmark_loads_no_torch() -> None:
    """Importing SGLang is timed with all that it loads."""
    code = "import sys, benchmarks.child, benchmarks.start; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


def test_an_engine_that_stops_short_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompilingEngine, "answers", 0.5)
    with pytest.raises(RuntimeError, match=r"request 1 for 1 tokens each was answered with \[0\]"):
        a_start(tmp_path, monkeypatch, start.CASES[2], "")
