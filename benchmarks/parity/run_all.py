"""The whole study, side by side on the GPUs of one machine; call it until all is done.

    python -m benchmarks.parity.run_all --gpus 0,1 --per-gpu 6 --deadline 570 --state runs/parity

First the weights that runs begin with, then the runs, a seed of every arm before the next seed,
then the held-out evaluations. Before the deadline each run writes a checkpoint and ends, and the
next call goes on. ``--timing`` runs the timed arms instead, for a few steps, one alone on a GPU:
side by side they take each other's time.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from benchmarks.parity import models
from benchmarks.parity.arms import ARMS
from benchmarks.parity.run import STOPPED
from benchmarks.parity.run_log import FINISHED, HELD_OUT
from benchmarks.parity.settings import Study, add_options, open_study
from benchmarks.parity.start import WARMED

BETWEEN_STARTS_S = 4.0
"""Of one GPU: an engine looks at the memory that is free when it starts."""
GRACE_S = 45.0
"""In this time before the deadline a run ends its step and writes its checkpoint."""
LEAST_S = 90.0
"""A job that has less time than this is not started: its engine takes 40 s."""
POLL_S = 0.2


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


def stages(study: Study, args: argparse.Namespace) -> list[list[Job]]:
    """Jobs that may run side by side, each list after the one before it."""
    runs = [
        (arm, seed)
        for seed in range(1 if args.timing else args.seeds)
        for arm in ARMS.values()
        if arm.model in models.models_of(args.size)
        and (arm.is_timed if args.timing else seed == 0 or not arm.planted)
    ]
    begun = list(dict.fromkeys(arm.model for arm, _ in runs))

    def job(name: str, script: str, makes: list[Path], *words: str) -> Job:
        settings = ("--size", args.size, "--settings", json.dumps(args.settings))
        program = (sys.executable, "-m", f"benchmarks.parity.{script}")
        return Job(name, (*program, "--state", str(args.state), *settings, *words), tuple(makes))

    starts = [
        job(f"start-{model}", "start", [study.start_folder(model) / WARMED], "--model", model)
        for model in begun
    ]
    options = ("--until", f"{args.until - GRACE_S:.0f}", *(("--timing",) if args.timing else ()))
    learning = []
    evaluated: dict[tuple[str, int], list[Path]] = defaultdict(list)
    for arm, seed in runs:
        folder = study.run_folder(arm.name, seed, args.timing)
        words = ("--arm", arm.name, "--seed", str(seed), *options)
        learning.append(job(f"{arm.name}-{seed}", "run", [folder / FINISHED], *words))
        evaluated[arm.model, seed].append(folder / HELD_OUT)
    evaluations = [
        job(f"held-out-{model}-{seed}", "held_out", makes, "--model", model, "--seed", str(seed))
        for (model, seed), makes in evaluated.items()
    ]
    return [starts, learning] if args.timing else [starts, learning, evaluations]


def run_jobs(jobs: list[Job], slots: list[str], logs: Path, until: float) -> None:
    """Run the jobs that are not done, until all have ended or the time is up.

    Args:
        slots: the GPU of each job that runs at the same time, as CUDA_VISIBLE_DEVICES names it.
        logs: folder for what the jobs print, a file each, appended to.
        until: of ``time.time``, when everything has ended.
    """
    logs.mkdir(parents=True, exist_ok=True)
    waiting, free = [job for job in jobs if not job.is_done], list(slots)
    running: list[tuple[Job, str, subprocess.Popen[bytes]]] = []
    started = dict.fromkeys(slots, 0.0)
    try:
        while running or (waiting and time.time() < until - LEAST_S):
            ready = [gpu for gpu in free if time.time() > started[gpu] + BETWEEN_STARTS_S]
            if waiting and ready and time.time() < until - LEAST_S:
                job, gpu = waiting.pop(0), ready[0]
                free.remove(gpu)
                started[gpu] = time.time()
                running.append((job, gpu, _start(job, gpu, logs)))
            for each in [each for each in running if _has_ended(each[2])]:
                running.remove(each)
                free.append(each[1])
                _end(each[0], each[2])
            if time.time() > until:
                break
            time.sleep(POLL_S)
    finally:
        for job, _, process in running:
            _end(job, process)


def _start(job: Job, gpu: str, logs: Path) -> "subprocess.Popen[bytes]":
    print(f"{job.name}  starts, CUDA_VISIBLE_DEVICES={gpu}", flush=True)
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    with (logs / f"{job.name}.log").open("ab") as out:
        return subprocess.Popen(
            job.command, stdout=out, stderr=out, env=environ, start_new_session=True
        )


def _has_ended(process: "subprocess.Popen[bytes]") -> bool:
    """Whether it has; it is left unreaped, so that its group is still its own."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, process.pid, options) is not None


def _end(job: Job, process: "subprocess.Popen[bytes]") -> None:
    """End all that a job has started, itself included."""
    os.killpg(process.pid, signal.SIGKILL)
    status = process.wait()
    how = "is done" if job.is_done else "is to go on" if status == STOPPED else f"failed: {status}"
    print(f"{job.name}  {how}", flush=True)


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    began = time.time()
    parser = argparse.ArgumentParser(description="The whole study; call it again to go on.")
    add_options(parser)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    parser.add_argument("--gpus", default=gpus, help="as CUDA_VISIBLE_DEVICES lists them")
    parser.add_argument("--per-gpu", type=int, default=4, help="jobs side by side on a GPU (4)")
    parser.add_argument("--deadline", type=float, default=570, help="seconds from now (570)")
    parser.add_argument("--seeds", type=int, default=3, help="of each arm (3)")
    parser.add_argument("--timing", action="store_true", help="time a few steps, each arm alone")
    args = parser.parse_args(argv)
    args.until = began + args.deadline
    return args


def main() -> None:
    args = arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each job: there are many
    study = open_study(args)
    slots = args.gpus.split(",") * (1 if args.timing else args.per_gpu)
    for jobs in stages(study, args):
        run_jobs(jobs, slots, args.state / "logs", args.until)
        if left := [job.name for job in jobs if not job.is_done]:
            sys.exit(f"left: {', '.join(left)}; see {args.state / 'logs'}, and call again to go on")


if __name__ == "__main__":
    main()
