"""A whole study, side by side on the GPUs of one machine; call it until all is done.

    python -m benchmarks.learning.run_all --size large --seeds 4 --gpus 0,1,2,3 --per-gpu 2 \\
        --deadline 1640 --state runs/learning

First the weights that runs begin with, then a seed of every arm before the next seed, then the
evaluations of what is finished. Each run writes a checkpoint before the deadline and ends; the next
call goes on, also with what failed: engines that start side by side may take each other's port.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock

from benchmarks import processes
from benchmarks.environment import ROOT
from benchmarks.learning.run import FINISHED, HELD_OUT, STOPPED
from benchmarks.learning.start import WARMED
from benchmarks.learning.study import ARMS, DEFAULT_ARMS, Study, add_options, open_study

BETWEEN_STARTS_S = 4.0
"""Of one GPU: an engine looks at the memory that is free when it starts."""
GRACE_S, EVALUATION_S = 45.0, 150.0
"""Before the deadline: for a run's last step and checkpoint, then for an engine that evaluates the
runs of a seed."""
ended = Event()
"""Set by SIGTERM: no job outlives this process."""


@dataclass(frozen=True)
class Job:
    """A process to run to its end, maybe over several calls."""

    name: str
    command: tuple[str, ...]
    makes: tuple[Path, ...]
    """All exist when there is nothing left to do."""

    @property
    def is_done(self) -> bool:
        return all(path.exists() for path in self.makes)


def phases_of(of: Study, args: argparse.Namespace) -> list[tuple[float, list[Job]]]:
    """When each phase has to end, and its jobs; no job waits for another of its phase."""

    def job(name: str, script: str, makes: list[Path], *words: str) -> Job:
        program = (sys.executable, "-m", f"benchmarks.learning.{script}")
        options = ("--state", str(of.state), "--size", args.size)
        settings = ("--settings", json.dumps(args.settings))
        return Job(name, (*program, *options, *settings, *words), tuple(makes))

    until = args.until - GRACE_S - EVALUATION_S
    runs, evaluations = [], []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        folders = {name: of.run_folder(name, seed) for name in args.arms}
        for name, folder in folders.items():
            words = ("--arm", name, "--seed", str(seed), "--until", f"{until:.0f}")
            runs.append(job(folder.name, "run", [folder / FINISHED], *words))
        makes = [folder / HELD_OUT for folder in (of.start, *folders.values())]
        evaluations.append(job(f"held-out-{seed}", "run", makes, "--held-out", "--seed", str(seed)))
    start = job("start", "start", [of.start / WARMED])
    return [(until, [start]), (until + GRACE_S, runs), (args.until, evaluations)]


def run_jobs(jobs: Sequence[Job], slots: Sequence[str], logs: Path, until: float) -> None:
    """Run the jobs that are not done, until all have ended or the time is up.

    Args:
        slots: the GPU of each job that runs at the same time, as CUDA_VISIBLE_DEVICES names it.
        logs: folder for what the jobs print, a file each, appended to.
        until: of ``time.time``, when everything has ended.
    """
    logs.mkdir(parents=True, exist_ok=True)
    left = iter([job for job in jobs if not job.is_done])
    locks = {gpu: Lock() for gpu in slots}

    def work(gpu: str) -> None:
        def is_over() -> bool:
            return ended.is_set() or time.time() > until

        while not is_over() and (job := next(left, None)):
            with locks[gpu]:
                time.sleep(BETWEEN_STARTS_S)
            print(f"{job.name}  starts, CUDA_VISIBLE_DEVICES={gpu}", flush=True)
            environ = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
            with (logs / f"{job.name}.log").open("ab") as out:
                status = processes.finish(job.command, out, environ, ROOT, is_over)
            # 0: it evaluated what was finished; None: its time was up
            is_to_go_on = status in (0, STOPPED, None)
            how = (
                "is done" if job.is_done else "is to go on" if is_to_go_on else f"failed: {status}"
            )
            print(f"{job.name}  {how}", flush=True)

    with ThreadPoolExecutor(len(slots)) as pool:
        list(pool.map(work, slots))


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    began = time.time()
    parser = argparse.ArgumentParser(description="The whole study; call it again to go on.")
    add_options(parser)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*DEFAULT_ARMS])
    parser.add_argument("--gpus", default=gpus, help="as CUDA_VISIBLE_DEVICES lists them")
    parser.add_argument("--per-gpu", type=int, default=4, help="jobs side by side on a GPU (4)")
    parser.add_argument("--deadline", type=float, default=570, help="seconds from now (570)")
    parser.add_argument("--seeds", type=int, default=4, help="of each arm (4)")
    parser.add_argument("--first-seed", type=int, default=0, help="the next ones follow (0)")
    args = parser.parse_args(argv)
    args.until = began + args.deadline
    return args


def main() -> None:
    args = arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each job: there are many
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    of = open_study(args)
    phases = phases_of(of, args)
    for until, jobs in phases:
        # without weights to begin with, each run would make its own
        if of.start.exists() or jobs is phases[0][1]:
            run_jobs(jobs, args.gpus.split(",") * args.per_gpu, of.state / "logs", until)
    if left := [job.name for _, jobs in phases for job in jobs if not job.is_done]:
        sys.exit(f"left: {', '.join(left)}; see {of.state / 'logs'}, and call again to go on")


if __name__ == "__main__":
    main()
