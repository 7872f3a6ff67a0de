"""Time our kernels of a layer beside what SGLang runs in their place, on one GPU: kernel_times.py.

  activations   quantization, alone and in RMSNorm and SiLU        kernels_activation.py
  qk_rope       QK-norm, rotary embedding, FP8 KV store            kernels_kv.py
  store         FP8 KV store                                       kernels_kv.py
  factors       query heads times factors                          kernels_kv.py
  sampler       temperature sampling with log-probabilities        kernels_sampler.py
  xqa           decode attention over FP8 KV                       kernels_xqa.py

Shapes are those of Qwen3-8B. Before it is timed each pair is held to compute the same: the same
codes, tokens or bytes, or values that are next to each other. Each part runs in a process of its
own; one that crashes, hangs or does not agree becomes a row with the reason. What is timed is a
CUDA graph of 36 calls (8 of attention), each with tensors of its own; the sampler runs as the
engine runs it, outside of graphs. The first run on a machine compiles SGLang's kernels: run it
twice. Figures go to results/kernels.json, from which examples/readme.py makes a table.
"""

import argparse
import time
from pathlib import Path

from benchmarks import processes, result_rows
from benchmarks.environment import environment, host

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "kernels.json"
MODEL = "qwen3-8b"
PARTS = {
    "activations": ("kernels_activation", "pairs"),
    "qk_rope": ("kernels_kv", "qk_rope"),
    "store": ("kernels_kv", "store"),
    "factors": ("kernels_kv", "factors"),
    "sampler": ("kernels_sampler", "pairs"),
    "xqa": ("kernels_xqa", "pairs"),
}
"""Module, and the function that yields its pairs."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--limit-s", type=float, default=240.0, help="time limit of a part")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    if set(options.parts) != set(PARTS) and options.output == RESULTS:
        parser.error("some --parts would take the place of all; name another --output")
    return options


def command(options: argparse.Namespace) -> str:
    """How to repeat the run, without a path, which is of one machine only."""
    words = ["python examples/benchmarks/kernel_times.py"]
    if set(options.parts) != set(PARTS):
        words.append(f"--parts {' '.join(options.parts)}")
    return " ".join(words)


def run_part(name: str, limit_s: float) -> list[result_rows.Report]:
    """Run one part in its process: its reports, or one with the sentence of its failure."""
    outcome = processes.run_job(
        HERE / "kernels_arm.py",
        {"part": PARTS[name]},
        limit_s,
        processes.engine_environment(stock=True),
    )
    if outcome.report is None:
        return [{"arm": "both", "case": name, "model": MODEL, "failure": outcome.failure}]
    found: list[result_rows.Report] = outcome.report["reports"]
    return found


def rows_of(reports: list[result_rows.Report]) -> list[result_rows.Row]:
    """All rows, with ratios between the two arms of a case."""
    return result_rows.compared(
        [row for report in reports for row in result_rows.rows_of([report])]
    )


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    facts = environment(command(options)) | {"host": host()}
    reports: list[result_rows.Report] = []
    for name in options.parts:
        started = time.perf_counter()
        found = run_part(name, options.limit_s)
        reports += found
        result_rows.save(options.output, facts, rows_of(reports), [])
        for row in rows_of(found):
            print(result_rows.line(row))
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
