"""Measure rollouts on one GPU, ours beside stock SGLang's: rollout.py [--arms ...] [--cases ...].

Each arm runs in a process of its own, its loads in one and its long-tailed rollout in another, one
after the other; what crashes or hangs becomes a row with the reason. On an H200, where kernels were
compiled before:

  32x512 128x512 256x512 64x8192 16x30000   prefill and decode apart       75 to 150 s an arm
  rollout                                   512 prompts, a long tail       7 to 14 minutes an arm

Figures go to results/rollout.json, or those of ``--cases rollout`` to results/long_tail.json, after
each process, and rows of other arms and cases stay where machine, boot and commit are the same, so
a run may be cut into calls. It may also be spread over several GPUs of one host side by side, each
call with a CUDA_VISIBLE_DEVICES and an --output of its own; then ``rollout.py --merge A.json
B.json`` makes one file. Ratios are between the arms of one case in a file: one kind of card,
driver, commit and boot, but with --merge perhaps two cards, whose copy bandwidths are in the file.
examples/readme.py makes docs/performance.md's tables from it.

``--requests`` makes the rollout smaller. The KV cache of every arm is then cut in the same
proportion, so that the BF16 engine still has 1.5 times as much to hold as it can.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks import long_tail, processes, result_rows, rollout_cases
from benchmarks.environment import environment, host
from benchmarks.models import MODELS

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "rollout.json"
LONG_TAIL = HERE / "results" / "long_tail.json"
"""Of the long-tailed rollout alone, which takes a machine for as long as all loads do."""


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = rollout_cases.NAMES
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b")
    parser.add_argument("--arms", nargs="+", choices=names, default=list(rollout_cases.DEFAULT))
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="loads, or 'rollout'")
    parser.add_argument("--requests", type=int, default=rollout_cases.REQUESTS)
    parser.add_argument("--layers", type=int, help="a try-out with fewer layers")
    parser.add_argument("--limit-s", type=float, default=1800.0, help="time limit of a process")
    parser.add_argument("--output", type=Path, help=f"results/{RESULTS.name} or {LONG_TAIL.name}")
    parser.add_argument("--merge", nargs="+", type=Path, help="make one file of these; run nothing")
    options = parser.parse_args(argv)
    known = [load.name for load in rollout_cases.LOADS[options.model]] + [rollout_cases.ROLLOUT]
    options.cases = options.cases or known
    if unknown := set(options.cases) - set(known):
        parser.error(f"no case {', '.join(sorted(unknown))} of {options.model}; it has {known}")
    if options.output is None:
        options.output = LONG_TAIL if options.cases == [rollout_cases.ROLLOUT] else RESULTS
    if options.layers is not None and options.output in (RESULTS, LONG_TAIL):
        parser.error("--layers gives no figures of the whole model; name another --output")
    return options


def command(options: argparse.Namespace) -> str:
    """How to repeat the run; arms and cases may be run one by one."""
    words = ["python examples/benchmarks/rollout.py"]
    if options.layers is not None:
        words.append(f"--layers {options.layers}")
    return " ".join(words)


def jobs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What each process is to do, all loads first."""
    loads = [case for case in options.cases if case != rollout_cases.ROLLOUT]
    common = {"model": options.model, "layers": options.layers}
    made = []
    if loads:
        made += [common | {"arm": arm, "cases": loads, "requests": None} for arm in options.arms]
    if rollout_cases.ROLLOUT in options.cases:
        made += [
            common | {"arm": arm, "cases": [], "requests": options.requests} for arm in options.arms
        ]
    return made


def cases_of(job: dict[str, Any]) -> list[str]:
    """The cases of which a process makes rows."""
    if job["requests"] is not None:
        return [f"{rollout_cases.ROLLOUT} of {job['requests']}"]
    return list(job["cases"])


def run_job(job: dict[str, Any], limit_s: float) -> list[result_rows.Report]:
    """Run one process: a report of each case, with figures or the sentence of the failure."""
    environ = processes.engine_environment(rollout_cases.find(job["arm"]).stock)
    outcome = processes.run_job(HERE / "rollout_arm.py", job, limit_s, environ)
    if outcome.report is None:
        common = {"arm": job["arm"], "model": job["model"], "failure": outcome.failure}
        return [common | {"case": case} for case in cases_of(job)]
    found: list[result_rows.Report] = outcome.report["reports"]
    if job["requests"] is not None:
        found[0]["values"] |= long_tail.usage(outcome.log)
    return found


def rows_of(reports: list[result_rows.Report]) -> list[result_rows.Row]:
    """Rows of all reports."""
    return [row for report in reports for row in result_rows.rows_of([report])]


def save(path: Path, facts: dict[str, Any], every: list[result_rows.Row]) -> None:
    """Write all rows, in the order of the arms, with ratios."""
    order = {name: number for number, name in enumerate(rollout_cases.NAMES)}
    result_rows.save(
        path, facts, result_rows.compared(sorted(every, key=lambda row: order[row["arm"]])), []
    )


def main(argv: list[str] | None = None) -> None:
    options = arguments(argv)
    if options.merge:
        save(options.output, *result_rows.merged(options.merge, "rows", result_rows.identity))
        return
    facts = environment(command(options)) | {"host": host()}
    every = result_rows.kept(options.output, facts, [])
    for job in jobs(options):
        started = time.perf_counter()
        found = rows_of(run_job(job, options.limit_s))
        again = {(row["model"], row["arm"], row["case"]) for row in found}
        every = [row for row in every if (row["model"], row["arm"], row["case"]) not in again]
        every += found
        save(options.output, facts, every)
        for row in found:
            print(result_rows.line(row), flush=True)
        took = time.perf_counter() - started
        print(f"{job['arm']}: {', '.join(cases_of(job))}: {took:.0f} s", flush=True)


if __name__ == "__main__":
    main()
