"""Measure full weight updates on one GPU, ours beside stock SGLang's: update.py [--models ...].

Trainer and engine share the GPU. Each case of each arm runs in a process of its own, one after the
other; what crashes or hangs becomes a row with the reason. Figures go to results/update.json, from
which examples/readme.py makes a table of docs/performance.md.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import cases, processes, result_rows
from benchmarks.environment import environment
from benchmarks.models import MODELS

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "update.json"
LOG_LINES = 40  # of an arm that failed


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--arms", nargs="+", choices=cases.ARMS, default=list(cases.ARMS))
    parser.add_argument("--updates", type=int, default=10, help="timed updates a case")
    parser.add_argument("--layers", type=int, help="a try-out with fewer layers")
    parser.add_argument("--limit-s", type=float, default=300.0, help="time limit of a case")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    if options.layers is not None and options.output == RESULTS:
        parser.error("--layers gives no figures of the whole model; name another --output")
    return options


def command(options: argparse.Namespace) -> str:
    """How to repeat the run; models may be run one by one, and paths are of one machine only."""
    words = ["python examples/benchmarks/update.py"]
    if options.arms != list(cases.ARMS):
        words.append(f"--arms {' '.join(options.arms)}")
    for name, default in (("updates", 10), ("layers", None)):
        if getattr(options, name) != default:
            words.append(f"--{name} {getattr(options, name)}")
    return " ".join(words)


def run_case(case: cases.Case, model: str, options: argparse.Namespace) -> result_rows.Report:
    """Run one case in its process: its report, or one with the sentence of its failure."""
    layers = min(filter(None, (MODELS[model].layers, case.checkpoint_layers, options.layers)))
    memory = Path("/dev/shm")
    place = memory if case.checkpoint_layers and memory.is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as name:
        folder = Path(name)
        report = folder / "report.json"
        job = {
            "arm": case.arm,
            "case": case.name,
            "model": model,
            "layers": layers,
            "updates": options.updates,
            "folder": name,
            "report": str(report),
        }
        (folder / "job.json").write_text(json.dumps(job))
        argv = [sys.executable, str(HERE / "arms.py"), str(folder / "job.json")]
        outcome = processes.run(
            argv, report, folder / "log", options.limit_s, child_environment(case)
        )
    identity = {"arm": case.arm, "case": case.name, "model": model}
    if outcome.report is None:
        print("\n".join(outcome.log.splitlines()[-LOG_LINES:]), file=sys.stderr)
        return identity | {"failure": outcome.failure}
    return identity | outcome.report


def child_environment(case: cases.Case) -> dict[str, str]:
    """The environment of an arm's process."""
    # no GEMM is timed here, so none is compiled ahead
    environ = {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0", **os.environ}
    if case.stock:
        environ["SGLANG_PLUGINS"] = "none"  # SGLang then loads no plugin at all
    return environ


def line(report: result_rows.Report, seconds: float) -> str:
    """What is printed of a case."""
    head = f"{report['model']:14s} {report['arm']}, {report['case']}: "
    if "failure" in report:
        return f"{head}{report['failure']} ({seconds:.0f} s)"
    times = report["values"]["update_wall_ms"]
    return (
        f"{head}{min(times):.1f} to {max(times):.1f} ms, engine start {report['start_s']:.0f} s, "
        f"{seconds:.0f} s in all"
    )


def main() -> None:
    options = arguments()
    facts: dict[str, Any] = environment(command(options))
    kept = result_rows.kept(options.output, facts, options.models)
    reports: list[result_rows.Report] = []
    for model in options.models:
        for case in cases.CASES:
            if case.arm not in options.arms:
                continue
            started = time.perf_counter()
            reports.append(run_case(case, model, options))
            print(line(reports[-1], time.perf_counter() - started), flush=True)
            result_rows.save(options.output, facts, result_rows.rows_of(reports), kept)


if __name__ == "__main__":
    main()
