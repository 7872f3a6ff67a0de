"""Measure engine starts of the Qwen3-8B shape on one GPU: start.py [--layers N] [--graphs N].

Each start is made once, in a process of its own: ours with an empty DeepGEMM cache, ours with the
kernels that this compiled, and stock SGLang in block FP8 with the same kernels and without its
warm-up. Other caches, FlashInfer's above all, are the user's: on a new machine run it twice. What
crashes or hangs becomes a row with the reason. Figures go to results/start.json, from which
examples/readme.py makes a table of docs/performance.md.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import processes, result_rows
from benchmarks.environment import environment
from benchmarks.models import MODELS

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "start.json"
MODEL = "qwen3-8b"
GRAPHS = 32
LIMIT_S = 480.0
LOG_LINES = 40  # of a start that failed
ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "skip_server_warmup": True,
    "grammar_backend": "none",
    "log_level": "info",  # tells of the warm-up
    "attention_backend": "flashinfer",
    "cuda_graph_backend_prefill": "disabled",
    "chunked_prefill_size": 8192,
    "disable_radix_cache": True,
    "random_seed": 0,
    # the trainer's BF16 weights must fit beside it
    "mem_fraction_static": 0.6,
}
BLOCK_FP8 = {
    "quantization_config": {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
    }
}
WARM_UP_VARIABLES = ("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "SGLANG_JIT_DEEPGEMM_FAST_WARMUP")
_AHEAD = re.compile(
    r"(?:Compiled DeepGEMM kernels in|DeepGEMM kernels side by side failed after) ([\d.]+) s"
)
_BAR_BEGINS = "DeepGEMM warmup:   0%"
_BAR_ENDS = re.compile(r"DeepGEMM warmup: 100%\|[^|]*\| (\d+)/\1 \[[^,\]]*, *([\d.]+)(it/s|s/it)\]")


@dataclass(frozen=True)
class Case:
    """One start."""

    arm: str
    name: str
    engine: dict[str, Any]
    """Keywords of ``sglang.Engine`` besides those that all starts share."""
    environ: dict[str, str] = field(default_factory=dict)
    warm_up: bool = True
    """Whether DeepGEMM is to be warmed up."""


CASES = (
    Case("fp8rl", "cold DeepGEMM cache", {"quantization": "fp8rl"}),
    Case("fp8rl", "kernels compiled", {"quantization": "fp8rl"}),
    Case(
        "stock-block-fp8",
        "kernels compiled, warm-up off",
        {"quantization": "fp8", "json_model_override_args": json.dumps(BLOCK_FP8)},
        {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0", "SGLANG_PLUGINS": "none"},
        warm_up=False,
    ),
)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, help="a try-out with fewer layers")
    parser.add_argument(
        "--graphs", type=int, default=GRAPHS, help="largest batch size of a CUDA graph"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    if options.layers is not None and options.output == RESULTS:
        parser.error("--layers gives no figures of the whole model; name another --output")
    return options


def command(options: argparse.Namespace) -> str:
    """How to repeat the run, without a path, which is of one machine only."""
    words = ["python examples/benchmarks/start.py"]
    if options.layers is not None:
        words.append(f"--layers {options.layers}")
    if options.graphs != GRAPHS:
        words.append(f"--graphs {options.graphs}")
    return " ".join(words)


def shared_keywords(options: argparse.Namespace) -> dict[str, Any]:
    """Keywords of ``sglang.Engine`` in all starts."""
    return ENGINE | {"cuda_graph_max_bs_decode": options.graphs}


def deep_gemm_s(log: str) -> float | None:
    """Seconds of DeepGEMM's warm-up that an engine's log tells of, or None where it tells of none.

    Ours compiles ahead and logs how long; then a progress bar of SGLang's runs over the batch sizes
    of each weight shape, and its time is its count by its overall rate.
    """
    bars = log.split(_BAR_BEGINS)[1:]
    ended = [ends[-1] for bar in bars if (ends := _BAR_ENDS.findall(bar))]
    if not ended:
        return None
    seconds = sum(map(float, _AHEAD.findall(log)))
    for count, rate, unit in ended:
        seconds += int(count) / float(rate) if unit == "it/s" else int(count) * float(rate)
    return seconds


def run_case(case: Case, cache: Path, options: argparse.Namespace) -> result_rows.Report:
    """Make one start in its process: its report, or one with the sentence of its failure."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report = folder / "report.json"
        job = {
            "model": MODEL,
            "layers": options.layers or MODELS[MODEL].layers,
            "engine": shared_keywords(options) | case.engine,
            "cache": str(cache),
            "folder": name,
            "report": str(report),
        }
        (folder / "job.json").write_text(json.dumps(job))
        argv = [sys.executable, str(HERE / "engine_start.py"), str(folder / "job.json")]
        outcome = processes.run(
            argv, report, folder / "log", LIMIT_S, child_environment(case, cache)
        )
    warm_up_s = deep_gemm_s(outcome.log)
    failure = outcome.failure
    if failure is None and (warm_up_s is not None) is not case.warm_up:
        failure = f"its log tells of {'no ' if case.warm_up else 'a '}warm-up of DeepGEMM"
    if outcome.report is None or failure is not None:
        print("\n".join(outcome.log.splitlines()[-LOG_LINES:]), file=sys.stderr)
        return _identity(case) | {"failure": failure}
    outcome.report["values"]["deep_gemm_s"] = [warm_up_s or 0.0]
    return _identity(case) | outcome.report


def child_environment(case: Case, cache: Path) -> dict[str, str]:
    """The environment of a start's process: the case alone decides on the warm-up."""
    environ = {name: v for name, v in os.environ.items() if name not in WARM_UP_VARIABLES}
    return environ | {"SGLANG_DG_CACHE_DIR": str(cache)} | case.environ


def line(report: result_rows.Report, seconds: float) -> str:
    """What is printed of a start."""
    head = f"{result_rows.label(report)}: "
    if "failure" in report:
        return f"{head}{report['failure']} ({seconds:.0f} s)"
    values = {metric: value for metric, (value,) in report["values"].items()}
    return (
        f"{head}Engine() {values['start_s']:.1f} s, of which DeepGEMM {values['deep_gemm_s']:.1f} "
        f"s, after {values['import_s']:.1f} s of imports; {values['kernels_compiled']} kernels "
        f"compiled, {report['late'] or 'none'} later in {report['requests']} requests, "
        f"{seconds:.0f} s in all"
    )


def _identity(case: Case) -> result_rows.Report:
    return {"arm": case.arm, "case": case.name, "model": MODEL}


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    facts = environment(command(options)) | {"engine": shared_keywords(options)}
    reports: list[result_rows.Report] = []
    with tempfile.TemporaryDirectory() as cache:
        for case in CASES:
            started = time.perf_counter()
            if reports and "failure" in reports[0]:
                failure = "not started: the cold start, which compiles the kernels, failed"
                reports.append(_identity(case) | {"failure": failure})
            else:
                reports.append(run_case(case, Path(cache), options))
            print(line(reports[-1], time.perf_counter() - started), flush=True)
            result_rows.save(options.output, facts, result_rows.rows_of(reports), [])


if __name__ == "__main__":
    main()
