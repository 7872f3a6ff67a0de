"""Run a benchmark: ``python -m benchmarks.run NAME``; ``list`` names them, ``list NAME`` its jobs.

Each job runs in a process of its own, one after the other. One that crashes or does not end in time
becomes a failure with the exception's line. Rows go to ``results/NAME.json`` after each job, and
rows of other jobs stay there where machine, boot, versions and commit are the same: a run may be
cut into calls. With ``--restarts N`` the jobs run in turn, N times: A, B, A, B. A run may also be
spread over several GPUs of one host, each call with a CUDA_VISIBLE_DEVICES and an --output of its
own; ``--merge A.json B.json`` then makes one file, and one row of the starts of an arm on several.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import processes, result_rows
from benchmarks.benchmark import BENCHMARKS, Benchmark, Job, Measurement, Option, load
from benchmarks.environment import ROOT, environment, gpus

RESULTS = Path(__file__).resolve().parent / "results"


def arguments(name: str, benchmark: Benchmark, argv: Sequence[str]) -> argparse.Namespace:
    """The command line of one benchmark."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.run {name}",
        description=sys.modules[benchmark.measure.__module__].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for option in benchmark.options:
        parser.add_argument(_flag(option), type=int, default=option.default, help=option.help)
    parser.add_argument(
        "--only", nargs="+", metavar="PATTERN", help="jobs by a segment of the name or by a pattern"
    )
    parser.add_argument(
        "--cases", nargs="+", default=["*"], metavar="PATTERN", help="cases inside of a job"
    )
    parser.add_argument("--limit-s", type=float, default=benchmark.limit_s, help="of each job")
    parser.add_argument(
        "--restarts", type=int, default=1, help="runs of each job, in turn; a row has all values"
    )
    parser.add_argument("--logs", type=Path, help="folder to keep each job's log in")
    parser.add_argument("--output", type=Path, default=RESULTS / f"{name}.json")
    parser.add_argument("--merge", nargs="+", type=Path, help="make one file of these; run nothing")
    options = parser.parse_args(argv)
    own_file = options.output.resolve() == RESULTS / f"{name}.json"
    for option in benchmark.options:
        if option.tries_out and getattr(options, option.name) is not None and own_file:
            parser.error(
                f"{_flag(option)} gives no figures of the whole model; name another --output"
            )
    if not options.merge and gpus() is None:
        if benchmark.gpu == "needed":
            parser.error("nvidia-smi found no GPU; run it on a machine with an NVIDIA GPU")
        if benchmark.gpu == "optional" and own_file:
            parser.error("there is no GPU here, and times mean nothing; name another --output")
    if options.only and not selected(benchmark, options.only):
        names = ", ".join(job.name for job in benchmark.jobs)
        parser.error(f"no job matches {' '.join(options.only)}; the jobs are: {names}")
    return options


def selected(benchmark: Benchmark, only: Sequence[str] | None) -> list[Job]:
    """The jobs to run, in order."""
    return [
        job for job in benchmark.jobs if (any(map(job.matches, only)) if only else job.by_default)
    ]


def command(name: str, benchmark: Benchmark, options: argparse.Namespace) -> str:
    """How to repeat the run; jobs may be run one by one, and paths are of one machine only."""
    words = [f"python -m benchmarks.run {name}"]
    for option in benchmark.options:
        value = getattr(options, option.name)
        if value != option.default:
            words.append(f"{_flag(option)} {value}")
    return " ".join(words)


def run_job(job: Job, reference: str, passed: dict[str, Any], limit_s: float) -> processes.Outcome:
    """Run one job in its process. The last lines of a failed one's log go to stderr."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        output, log, description = (folder / file for file in ("output.json", "log", "job.json"))
        paths = {"folder": folder, "log": log, "output": output}
        given = {key: str(path) for key, path in paths.items()}
        description.write_text(
            json.dumps({"benchmark": reference, "name": job.name, **given, **passed})
        )
        words = [sys.executable, "-m", "benchmarks.child", str(description)]
        environ = processes.engine_environment(job.stock, job.environ)
        outcome = processes.run(words, output, log, limit_s, environ, cwd=ROOT)
    if outcome.failure is not None:
        print("\n".join(outcome.log.splitlines()[-processes.LOG_LINES :]), file=sys.stderr)
    return outcome


def run(name: str, benchmark: Benchmark, options: argparse.Namespace) -> None:
    """Run the selected jobs, and save after each."""
    stamped = environment(command(name, benchmark, options)) | dict(benchmark.facts)
    facts = json.loads(json.dumps(stamped))  # as a file gives it back, with lists for tuples
    results = result_rows.earlier(options.output, name, facts)
    passed: dict[str, Any] = {"cases": options.cases}
    passed["options"] = {option.name: getattr(options, option.name) for option in benchmark.options}
    measurements: dict[str, list[Measurement]] = defaultdict(list)
    for job in selected(benchmark, options.only) * options.restarts:
        started = time.perf_counter()
        outcome = run_job(job, BENCHMARKS[name], passed, options.limit_s)
        if options.logs is not None:
            options.logs.mkdir(parents=True, exist_ok=True)
            (options.logs / f"{job.name.replace('/', ', ')}.log").write_text(outcome.log)
        measurements[job.name] += outcome.output or []
        new = result_rows.rows_of(measurements[job.name])
        results = result_rows.updated(results, job.name, new, outcome.failure)
        result_rows.write(options.output, results)
        for row in new:
            print(result_rows.line(row))
        took = time.perf_counter() - started
        print(f"{job.name}: {outcome.failure or 'done'} ({took:.0f} s)", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name == "list":
        for listed in rest or BENCHMARKS:
            print(listed)
            for job in load(BENCHMARKS[listed]).jobs if rest else ():
                print(f"  {job.name}" + ("" if job.by_default else "  (not by default)"))
        return
    if name not in BENCHMARKS:
        sys.exit(f"{__doc__}\nNAME: {', '.join(BENCHMARKS)}")
    benchmark = load(BENCHMARKS[name])
    options = arguments(name, benchmark, rest)
    if options.merge:
        result_rows.write(options.output, result_rows.merged(name, options.merge))
        return
    run(name, benchmark, options)


def _flag(option: Option) -> str:
    return "--" + option.name.replace("_", "-")


if __name__ == "__main__":
    main()
