"""The start benchmark without a GPU: what is served, the log, rows, the page's tables."""

import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import engine_start, environment, models, readme, result_rows, start
from tests.benchmarks.facts import FACTS

AHEAD = "[2026-01-01 00:00:00] Compiled DeepGEMM kernels in 20.5 s\n"
# what tqdm writes below another bar, and a bar by itself that is drawn twice at its end
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
    drawn = subprocess.run(
        [sys.executable, "-c", bar], capture_output=True, text=True, check=True, timeout=60
    )
    seconds = start.deep_gemm_s(drawn.stderr)
    assert seconds is not None and seconds > 0


def test_what_is_served() -> None:
    served = list(engine_start.requests(random.Random(0)))
    assert served == list(engine_start.requests(random.Random(0)))
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
        self.cache = Path(keywords["cache"])
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


def a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str) -> dict[str, Any]:
    import trainer_bridge

    def take(module: Any, engine: CompilingEngine, version: int) -> None:
        assert sum(1 for _ in module.parameters()) == 2 * 11 + 3
        engine.version = version

    tiny = models.Shape(hidden=256, intermediate=384, layers=36, heads=2, kv_heads=1, vocab=512)
    monkeypatch.setitem(models.MODELS, "tiny", tiny)
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(Engine=CompilingEngine))
    monkeypatch.setattr(trainer_bridge, "update", take)
    monkeypatch.setattr(engine_start, "DEVICE", "cpu")
    engine = {"quantization": quantization, "cache": str(tmp_path)}
    job = {"model": "tiny", "layers": 2, "engine": engine}
    return engine_start.run(job | {"cache": str(tmp_path), "folder": str(tmp_path)})


def test_kernels_are_counted_where_they_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = a_start(tmp_path, monkeypatch, "fp8rl")
    assert cold["values"]["kernels_compiled"] == [3]
    assert cold["values"]["kernels_compiled_after_start"] == [1]
    assert cold["late"] == {"transpose": 1} and cold["layers"] == 2
    json.dumps(cold)
    again = a_start(tmp_path, monkeypatch, "fp8")
    assert again["values"]["kernels_compiled"] == [0]
    assert again["values"]["kernels_compiled_after_start"] == [0]


def test_an_engine_that_stops_short_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompilingEngine, "answers", 0.5)
    with pytest.raises(RuntimeError, match=r"request 1 for 1 tokens each was answered with \[0\]"):
        a_start(tmp_path, monkeypatch, "fp8")


@pytest.mark.filterwarnings("ignore")
def test_engines_are_given_keywords_that_sglang_knows() -> None:
    pytest.importorskip("sglang")
    from inspect import signature

    from sglang.srt.server_args import ServerArgs

    known = set(signature(ServerArgs).parameters)
    shared = start.shared_keywords(start.arguments([]))
    for case in start.CASES:
        assert (shared | case.engine).keys() <= known


CHILD = """
import json, os, sys
from pathlib import Path
job = json.loads(Path(sys.argv[1]).read_text())
stock = job["engine"]["quantization"] == "fp8"
assert os.environ.get("SGLANG_PLUGINS") == ("none" if stock else None)
assert os.environ.get("SGLANG_JIT_DEEPGEMM_PRECOMPILE") == ("0" if stock else None)
assert "SGLANG_JIT_DEEPGEMM_FAST_WARMUP" not in os.environ
assert os.environ["SGLANG_DG_CACHE_DIR"] == job["cache"] and Path(job["cache"]).is_dir()
mark = Path(job["cache"]) / "mark"
cold, _ = not mark.exists(), mark.touch()
{body}
print("" if stock else {log!r} if cold else {log!r}.partition("\\n")[2])
values = {{"start_s": [40.0 if cold else 20.0], "import_s": [9.0 if cold else 8.0],
    "kernels_compiled": [30 * cold], "kernels_compiled_after_start": [2 * stock]}}
late = {{"gemm": 2}} if stock else {{}}
Path(job["report"]).write_text(json.dumps(
    {{"layers": job["layers"], "requests": 108, "late": late, "values": values}}))
"""


def run_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str = "", log: str = AHEAD + BELOW
) -> list[result_rows.Row]:
    """The rows of a run whose starts are made by ``CHILD``."""
    (tmp_path / "engine_start.py").write_text(CHILD.format(body=body, log=log))
    monkeypatch.setattr(start, "HERE", tmp_path)
    monkeypatch.setattr(start, "environment", lambda command: FACTS | {"command": command})
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    monkeypatch.setenv("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "1")
    monkeypatch.setenv("SGLANG_JIT_DEEPGEMM_FAST_WARMUP", "1")
    start.main(["--output", str(tmp_path / "start.json")])
    content = json.loads((tmp_path / "start.json").read_text())
    assert content["benchmark"] == "start"
    assert content["environment"]["engine"]["cuda_graph_max_bs_decode"] == start.GRAPHS
    made: list[result_rows.Row] = content["rows"]
    return made


def median_of(made: list[result_rows.Row], case: str, metric: str) -> Any:
    (row,) = [row for row in made if (row["case"], row["metric"]) == (case, metric)]
    return row["median"]


def test_a_run_becomes_rows_and_the_readme_s_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(readme, "RESULTS", tmp_path)
    text = "a\n<!-- measured: start -->\n<!-- end -->\nb\n"
    assert readme.BLOCK.sub(readme.filled, text) == text  # nothing was measured yet
    made = run_all(tmp_path, monkeypatch)
    schema = {"arm", "model", "case", "metric", "unit", "median", "min", "max", "n", "ratios"}
    assert all(schema <= row.keys() and row["n"] == 1 for row in made)
    assert {row["unit"] for row in made if row["metric"].endswith("_s")} == {"s"}
    assert median_of(made, "cold DeepGEMM cache", "deep_gemm_s") == 21.0
    assert median_of(made, "kernels compiled", "deep_gemm_s") == 0.5
    assert median_of(made, "kernels compiled, warm-up off", "deep_gemm_s") == 0.0
    (cold,) = [row for row in made if row["metric"] == "start_s" and "cold" in row["case"]]
    assert cold["layers"] == 36
    assert cold["ratios"]["stock-block-fp8, kernels compiled, warm-up off"] == 0.5
    assert "30 kernels compiled, none later in 108 requests" in capsys.readouterr().out

    once = readme.BLOCK.sub(readme.filled, text)
    assert readme.BLOCK.sub(readme.filled, once) == once
    lines = once.splitlines()
    assert "| fp8rl, cold DeepGEMM cache | 40.0 s | 21.0 s | 30 | 0 |" in lines
    assert "| fp8rl, kernels compiled | 20.0 s | 0.5 s | 0 | 0 |" in lines
    assert "| stock-block-fp8, kernels compiled, warm-up off | 20.0 s | 0.0 s | 0 | 2 |" in lines
    for fact in (
        *("NVIDIA H200", "580.1", "SGLang 0.5.17", "2026-01-01", "abc1234", "36 layers"),
        *("CUDA graphs up to batch size 32", "prefill graphs off", "attention backend flashinfer"),
        *("warm-up request off", "took 8.0 to 9.0 s"),
    ):
        assert fact in lines[-3]


def test_a_start_that_dies_becomes_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = run_all(tmp_path, monkeypatch, "if stock: raise MemoryError('a | b')")
    failed = made[-1]
    assert (failed["metric"], failed["arm"]) == ("failure", "stock-block-fp8")
    assert failed["sentence"] == "exit status 1: MemoryError: a | b"
    assert median_of(made, "kernels compiled", "start_s") == 20.0
    block = readme.start((tmp_path / "start.json").read_text())
    assert (
        "| stock-block-fp8, kernels compiled, warm-up off | fails: exit status 1: "
        r"MemoryError: a \| b | | | |" in block.splitlines()
    )


def test_without_a_cold_start_no_kernels_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run_all(tmp_path, monkeypatch, "os.kill(os.getpid(), 9)")
    assert [row["metric"] for row in made] == ["failure"] * 3
    assert made[0]["sentence"].startswith("ended by SIGKILL")
    assert all("the cold start" in row["sentence"] for row in made[1:])
    assert "Importing" not in readme.start((tmp_path / "start.json").read_text())


def test_a_warm_up_that_did_not_happen_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run_all(tmp_path, monkeypatch, log="nothing\n")
    assert made[0]["sentence"] == "its log tells of no warm-up of DeepGEMM"
    made = run_all(tmp_path, monkeypatch, f"print({BELOW!r})")
    assert made[-1]["sentence"] == "its log tells of a warm-up of DeepGEMM"


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert start.command(start.arguments([])) == "python examples/benchmarks/start.py"
    tried = start.arguments(["--layers", "2", "--graphs", "8", "--output", "here/x.json"])
    assert start.command(tried).endswith("start.py --layers 2 --graphs 8")
    assert start.shared_keywords(tried)["cuda_graph_max_bs_decode"] == 8
    with pytest.raises(SystemExit):
        start.arguments(["--layers", "2"])
    assert "name another --output" in capsys.readouterr().err


def test_without_a_gpu_the_benchmark_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert start.environment is environment.environment
    with pytest.raises(RuntimeError, match="on a machine with an NVIDIA GPU"):
        start.main(["--output", str(tmp_path / "start.json")])
    assert not (tmp_path / "start.json").exists()
