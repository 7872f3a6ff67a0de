"""Measure what each mitigation does to logprobs, and what it costs: mitigations.py [--cases NAME
...].

Each case is an engine beside a BF16 trainer in a process of its own, one after the other: rollouts,
which the trainer scores, and the time of a decode step. What crashes or hangs becomes a row with
the reason. On an H200 a case of the experiment's 118 M parameters took 80 to 115 s, with other GPUs
of the host at work; fp8-ignore-list runs ``precision`` first.

  bf16, bf16-fp32-head         the noise that is there without FP8
  fp8, fp8-fp32-head           every layer that can be FP8; logits in FP32
  fp8-ends-bf16                the first and the last decoder layer in BF16
  fp8-ignore-list              the list of ``sgl-fp8rl precision`` for half the KL in BF16
  fp8-kv8                      an FP8 KV cache
  fp8-deterministic            --enable-deterministic-inference

Weights are random ones of a shape, or with --checkpoint those of a trained model, whose prompts
--prompts FILE.jsonl has; they come by an update. Cases may be run in several calls: rows of the
others, and of other models, stay where machine and commit are the same; or on several GPUs of one
host, to be joined by --merge. Figures go to results/mitigations.json, from which examples/readme.py
makes the table of docs/precision.md. Without a GPU the model is a tiny one, and times mean nothing.
"""

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks import mitigations_cases, processes, result_rows
from benchmarks.correction import facts
from benchmarks.environment import host
from benchmarks.mitigations_cases import CASES, NAMES, TINY

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "mitigations.json"
COMMAND = "python examples/benchmarks/mitigations.py"
"""How to repeat the run; cases and models may be run one by one, paths are of one machine."""
HAS_GPU = shutil.which("nvidia-smi") is not None


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME")
    default = "qwen3-8b" if HAS_GPU else TINY
    parser.add_argument("--model", choices=mitigations_cases.SHAPES, default=default)
    parser.add_argument("--layers", type=int, help="of the random model, fewer than it has")
    parser.add_argument("--checkpoint", type=Path, help="folder of a trained model")
    parser.add_argument("--prompts", type=Path, help="JSONL file, as sgl-fp8rl precision takes it")
    parser.add_argument("--limit-s", type=float, default=240.0, help="time limit of a case")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--merge", nargs="+", type=Path, help="make one file of these; run nothing")
    options = parser.parse_args(argv)
    if options.checkpoint and not (options.checkpoint / "config.json").exists():
        parser.error(f"{options.checkpoint} holds no config.json; name the folder of a model")
    if not HAS_GPU and options.output == RESULTS and not options.merge:
        parser.error("there is no GPU here, and times would mean nothing; name another --output")
    return options


def run_case(name: str, options: argparse.Namespace) -> list[result_rows.Report]:
    """Run one case in its process: its reports, or one with the sentence of the failure."""
    paths = {
        key: str(path.resolve()) if path else None
        for key, path in (("checkpoint", options.checkpoint), ("prompts", options.prompts))
    }
    job = {"name": name, "model": options.model, "layers": options.layers, **paths}
    environ = processes.engine_environment(stock=False)
    outcome = processes.run_job(HERE / "mitigations_arm.py", job, options.limit_s, environ)
    if outcome.report is None:
        failed = {"arm": name, "model": model_name(options), "failure": outcome.failure}
        return [failed | {"case": "engine"}]
    found: list[result_rows.Report] = outcome.report["reports"]
    return found


def model_name(options: argparse.Namespace) -> str:
    """What rows call the model, which only a process that loads it knows better."""
    if options.checkpoint is not None:
        return str(options.checkpoint.name)
    return mitigations_cases.random_name(options.model, options.layers)


def save(path: Path, environment: dict[str, Any], every: list[result_rows.Row]) -> None:
    """Write all rows in the order of the cases, with ratios between arms of one model and case."""
    every.sort(key=lambda row: (row["model"], NAMES.index(row["arm"])))
    result_rows.save(path, environment, result_rows.compared(every), [])


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    if options.merge:
        save(options.output, *result_rows.merged(options.merge, "rows", result_rows.identity))
        return
    environment = facts(COMMAND) | {"host": host()}
    every = result_rows.kept(options.output, environment, [])
    for case in (case for case in CASES if case.name in options.cases):
        started = time.perf_counter()
        found = [
            row for report in run_case(case.name, options) for row in result_rows.rows_of([report])
        ]
        for row in found:
            row["process"] = case.name
        again = {(row["model"], row["process"]) for row in found}
        every = [row for row in every if (row["model"], row["process"]) not in again] + found
        save(options.output, environment, every)
        for row in found:
            print(result_rows.line(row), flush=True)
        print(f"{case.name}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
