"""A whole study, side by side on the GPUs of one machine; call it until all is done.

    python -m benchmarks.parity.run_all --gpus 0,1 --per-gpu 6 --deadline 570 --state runs/parity

First the weights that runs begin with, then the runs, a seed of every arm with its held-out
evaluations before the next seed; a job waits only for those that it builds on. Before the deadline
each run writes a checkpoint and ends, so that what is finished can still be evaluated; the next
call goes on. A job that fails is tried once more: engines that start side by side may take each
other's port. ``--timing`` runs the timed arms instead, for a few steps, one alone on a GPU: side by
side they take each other's time.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.parity.jobs import Job, jobs_of
from benchmarks.parity.run import STOPPED
from benchmarks.parity.run_log import FAILED
from benchmarks.parity.settings import Study, add_options, open_study

BETWEEN_STARTS_S = 4.0
"""Of one GPU: an engine looks at the memory that is free when it starts."""
LEAST_S = 60.0
"""A job that has less time than this is not started: its engine takes 40 s."""
POLL_S = 0.2
START_S, STEP_S = 60.0, 4.0
"""Of a run of the first study, with six on a GPU: its engine and evaluations, a step."""


def run_jobs(jobs: list[Job], slots: list[str], logs: Path, until: float) -> None:
    """Run the jobs that are not done, until all have ended or the time is up; a job that fails is
    tried once more in each call.

    Args:
        slots: the GPU of each job that runs at the same time, as CUDA_VISIBLE_DEVICES names it.
        logs: folder for what the jobs print, a file each, appended to; ``FAILED`` is beside it.
        until: of ``time.time``, when everything has ended.
    """
    logs.mkdir(parents=True, exist_ok=True)
    waiting, free = [job for job in jobs if not job.is_done], list(slots)
    running: list[tuple[Job, str, subprocess.Popen[bytes]]] = []
    started = dict.fromkeys(slots, 0.0)
    failed: set[str] = set()

    def open_jobs() -> list[Job]:
        return [*waiting, *(job for job, _, _ in running)]

    def may_start(job: Job) -> bool:
        """Whether there is time for it, and all that it needs is there or to come."""
        coming = {path for each in open_jobs() for path in each.makes}
        has_time = time.time() < until - LEAST_S - job.spare_s
        return has_time and all(path.exists() or path in coming for path in job.needs)

    def can_start(job: Job) -> bool:
        is_first = {each.name for each in open_jobs()}.isdisjoint(job.after)
        return is_first and all(path.exists() for path in job.needs)

    try:
        while (waiting or running) and time.time() < until:
            waiting = [job for job in waiting if may_start(job)]
            ready = [gpu for gpu in free if time.time() > started[gpu] + BETWEEN_STARTS_S]
            startable = next(filter(can_start, waiting), None)
            if startable is not None and ready:
                waiting.remove(startable)
                free.remove(ready[0])
                started[ready[0]] = time.time()
                running.append((startable, ready[0], _start(startable, ready[0], logs)))
            for each in [each for each in running if _has_ended(each[2])]:
                running.remove(each)
                free.append(each[1])
                job = each[0]
                if _end(job, each[2], logs.parent / FAILED) and job.name not in failed:
                    failed.add(job.name)
                    waiting.insert(0, job)
            time.sleep(POLL_S)
    finally:
        for job, _, process in running:
            _end(job, process, None)


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


def _end(job: Job, process: "subprocess.Popen[bytes]", failures: Path | None) -> bool:
    """End all that a job has started, itself included.

    Args:
        failures: the file of those that failed; None where the time is up.

    Returns:
        whether it failed.
    """
    os.killpg(process.pid, signal.SIGKILL)
    status = process.wait()
    is_to_go_on = status in (0, STOPPED)  # 0: it evaluated what was finished
    has_failed = failures is not None and not job.is_done and not is_to_go_on
    how = "is done" if job.is_done else f"failed: {status}" if has_failed else "is to go on"
    print(f"{job.name}  {how}", flush=True)
    if failures is not None and has_failed:
        with failures.open("a") as file:
            file.write(json.dumps({"job": job.name, "status": status}) + "\n")
    return has_failed


def plan(study: Study, jobs: list[Job], slots: int) -> str:
    """What is left to do, and about how long it takes."""
    left = [job for job in jobs if not job.is_done]
    runs = [job for job in left if "--arm" in job.command]
    lines = [f"{job.name}  {'done' if job.is_done else 'left'}" for job in jobs]
    waves = -(-len(runs) // slots)
    each = START_S + study.settings.steps * STEP_S
    return "\n".join(
        [
            *lines,
            f"{len(left)} of {len(jobs)} jobs are left, {len(runs)} of them runs of "
            f"{study.settings.steps} steps: {waves} times some {each / 60:.0f} minutes for "
            f"{slots} at once, besides starts, scans and evaluations",
        ]
    )


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
    parser.add_argument("--first-seed", type=int, default=0, help="the next ones follow (0)")
    parser.add_argument("--models", nargs="*", help="only runs of these (all)")
    parser.add_argument("--timing", action="store_true", help="time a few steps, each arm alone")
    parser.add_argument("--list", action="store_true", help="print the jobs, and start none")
    args = parser.parse_args(argv)
    args.until = began + args.deadline
    return args


def main() -> None:
    args = arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of each job: there are many
    # so that no job outlives this process, and none has another beside it after the next call
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    study = open_study(args)
    slots = args.gpus.split(",") * (1 if args.timing else args.per_gpu)
    jobs = list(jobs_of(study, args))
    if args.list:
        print(plan(study, jobs, len(slots)))
        return
    run_jobs(jobs, slots, args.state / "logs", args.until)
    if left := [job.name for job in jobs if not job.is_done]:
        sys.exit(f"left: {', '.join(left)}; see {args.state / 'logs'}, and call again to go on")


if __name__ == "__main__":
    main()
