"""Measure the FP8 KV cache on one GPU, ours beside stock SGLang's: kv.py [--cases NAME ...].

Each case runs in a process of its own, one after the other; what crashes or hangs becomes a row
with the reason. On an H200, where kernels were compiled before (the first run compiles them):

  attention, attention-bf16-mma   error against float64, time of a call       30 s each
  engine-*                        capacity, prefill, decode of Qwen3-8B       65 to 80 s each
  logprobs-*                      error against a BF16 KV cache, 6 layers     30 s each
  update                          updates with KV scales and without          75 s

Without --cases all but engine-stock-bf16-kv8-xqa and engine-fp8rl-kv8-per-head run. Cases may be
run in several calls: rows of the others stay where machine and commit are the same; or side by side
on several GPUs of one host, to be joined by --merge. Ratios are between arms of one file. Logprobs
need ``logprobs-bf16`` in the same call. Figures go to
results/kv.json, from which examples/readme.py makes a table of docs/performance.md.
"""

import argparse
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import processes, result_rows
from benchmarks.environment import environment, host
from benchmarks.kv_cases import CASES, CUT_MODEL, DEFAULT, MODEL, NAMES, REFERENCE, Case

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "kv.json"

Raw = dict[str, dict[str, Any]]
"""What ``kv_engines.logprobs`` found, by weights."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=NAMES, default=list(DEFAULT), metavar="NAME")
    parser.add_argument("--layers", type=int, help="a try-out of the engines with fewer layers")
    parser.add_argument("--limit-s", type=float, default=240.0, help="time limit of a case")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--merge", nargs="+", type=Path, help="make one file of these; run nothing")
    options = parser.parse_args(argv)
    if options.layers is not None and options.output == RESULTS:
        parser.error("--layers gives no figures of the whole model; name another --output")
    asked = [case for case in CASES if case.name in options.cases]
    if any(case.part == "logprobs" for case in asked) and REFERENCE not in asked:
        parser.error(f"logprobs are held against those of {REFERENCE.name}; name it as well")
    return options


def command(options: argparse.Namespace) -> str:
    """How to repeat the run; cases may be run one by one, and paths are of one machine only."""
    words = ["python examples/benchmarks/kv.py"]
    if options.layers is not None:
        words.append(f"--layers {options.layers}")
    return " ".join(words)


def run_case(
    case: Case, options: argparse.Namespace, to_score: dict[str, Any]
) -> processes.Outcome:
    """Run one case in its process."""
    job = {"name": case.name, "layers": options.layers, "to_score": to_score}
    environ = processes.engine_environment(case.stock)
    return processes.run_job(HERE / "kv_arm.py", job, options.limit_s, environ)


def sampled(raws: dict[str, Raw]) -> dict[str, dict[str, Any]]:
    """What the reference is to score: sequences by weights and arm."""
    found: dict[str, dict[str, Any]] = {}
    for arm, raw in raws.items():
        for planted, mine in raw.items():
            found.setdefault(planted, {})[arm] = mine["sampled"]
    return found


def logprob_reports(raws: dict[str, Raw]) -> list[result_rows.Report]:
    """Mean |difference| of each sequence's logprobs to those of prefill over BF16 KV.

    ``logprob_error`` of prefill on the same sequences, ``logprob_error_decode`` of decode on the
    sequences that were sampled. The reference has the second one only: its own decode's.
    """
    reference = raws[REFERENCE.arm]
    reports: list[result_rows.Report] = []
    for arm, raw in raws.items():
        for planted, mine in raw.items():
            wanted = reference[planted]
            values = {"logprob_error_decode": distances(mine["decode"], wanted["scored"][arm])}
            if arm != REFERENCE.arm:
                values["logprob_error"] = distances(mine["prefill"], wanted["prefill"])
            case = f"logprobs, {planted}"
            reports.append({"arm": arm, "case": case, "model": CUT_MODEL, "values": values})
    return reports


def distances(some: list[list[float]], others: list[list[float]]) -> list[float]:
    """Mean |difference| of each pair of rows."""
    return [
        fmean(abs(a - b) for a, b in zip(mine, theirs, strict=True))
        for mine, theirs in zip(some, others, strict=True)
    ]


def failed(case: Case, failure: str) -> result_rows.Report:
    """The report of a case without figures."""
    model = CUT_MODEL if case.part == "logprobs" else MODEL
    return {"arm": case.arm, "case": case.part, "model": model, "failure": failure}


def rows_of(reports: dict[str, list[result_rows.Report]]) -> list[result_rows.Row]:
    """Rows of all cases, with ratios between arms of one load; each names its case's process."""
    return result_rows.compared(
        [
            row | {"process": name}
            for name, found in reports.items()
            for row in result_rows.rows_of(found)
        ]
    )


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    if options.merge:
        facts, every = result_rows.merged(options.merge, "rows", result_rows.identity)
        every.sort(key=lambda row: NAMES.index(row["process"]))
        result_rows.save(options.output, facts, result_rows.compared(every), [])
        return
    facts = environment(command(options)) | {"host": host()}
    kept = [
        row
        for row in result_rows.kept(options.output, facts, [])
        if row["process"] not in options.cases
    ]
    reports: dict[str, list[result_rows.Report]] = {}
    raws: dict[str, Raw] = {}
    for case in (case for case in CASES if case.name in options.cases):
        started = time.perf_counter()
        outcome = run_case(case, options, sampled(raws) if case == REFERENCE else {})
        if outcome.report is None:
            reports[case.name] = [failed(case, str(outcome.failure))]
        elif case.part == "logprobs":
            raws[case.arm] = outcome.report["logprobs"]
        else:
            reports[case.name] = outcome.report["reports"]
        if case == REFERENCE and case.arm in raws:
            by_arm = {found.arm: found.name for found in CASES if found.part == "logprobs"}
            for report in logprob_reports(raws):
                reports.setdefault(by_arm[report["arm"]], []).append(report)
        how = outcome.failure or "done"
        print(f"{case.name}: {how} ({time.perf_counter() - started:.0f} s)", flush=True)
        result_rows.save(options.output, facts, rows_of(reports), kept)
    for row in rows_of(reports):
        print(result_rows.line(row), flush=True)


if __name__ == "__main__":
    main()
