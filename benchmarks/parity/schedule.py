"""Runs jobs side by side on the GPUs of one machine, until all are done or the deadline comes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.parity.run import STOPPED

TRIES = 2
"""Starts of a job in one call, where it fails: engines that start at once may meet at a port."""
BETWEEN_STARTS_S = 4.0
"""Of one GPU: an engine looks at the memory that is free when it starts."""
GRACE_S = 45.0
"""In this time before the deadline a run ends its step and writes its checkpoint."""
LEAST_S = 90.0
"""A job that has less time than this before it must stop is not started: its engine takes 40 s."""
POLL_S = 0.2
LOG_LINES = 15  # of a job that failed


@dataclass(frozen=True)
class Job:
    """A process to run to its end, maybe over several calls."""

    name: str
    command: list[str]
    makes: tuple[Path, ...]
    """All exist when there is nothing left to do."""
    needs: tuple[Path, ...] = ()
    """All must exist before it starts."""
    stops: bool = False
    """Whether it takes ``--until``, and goes on where it stopped."""

    @property
    def is_done(self) -> bool:
        return all(path.exists() for path in self.makes)


@dataclass
class Running:
    """A job on a GPU."""

    job: Job
    gpu: str
    process: subprocess.Popen[bytes]


@dataclass
class Schedule:
    """Runs jobs, some to a GPU, until all are done or the deadline comes.

    Args:
        gpus: each as CUDA_VISIBLE_DEVICES names it; an empty name is the CPU.
        per_gpu: jobs side by side on each.
        logs: folder for what the jobs print, a file each, appended to.
        until: of ``time.monotonic``, when everything has ended.
    """

    gpus: Sequence[str]
    per_gpu: int
    logs: Path
    until: float
    failures: dict[str, int] = field(default_factory=dict)
    """Failed starts by job."""
    _running: list[Running] = field(default_factory=list)
    _started: dict[str, float] = field(default_factory=dict)
    """When a GPU got its last job."""
    _stopped: set[str] = field(default_factory=set)

    def run(self, jobs: list[Job]) -> list[Job]:
        """Returns the jobs that are not done."""
        self.logs.mkdir(parents=True, exist_ok=True)
        try:
            while time.monotonic() < self.until:
                self._collect()
                self._fill(jobs)
                if not self._running and not any(map(self._may_start, jobs)):
                    break
                time.sleep(POLL_S)
        finally:
            for running in self._running:
                _end(running)
        return [job for job in jobs if not job.is_done]

    def _may_start(self, job: Job) -> bool:
        """Whether it may start in this call, once there is room."""
        return (
            not job.is_done
            and all(path.exists() for path in job.needs)
            and job.name not in self._stopped
            and self.failures.get(job.name, 0) < TRIES
            and job.name not in {running.job.name for running in self._running}
            and self.until - time.monotonic() > LEAST_S
        )

    def _fill(self, jobs: list[Job]) -> None:
        for job in filter(self._may_start, jobs):
            load = {gpu: sum(r.gpu == gpu for r in self._running) for gpu in self.gpus}
            ready = [
                gpu
                for gpu in self.gpus
                if load[gpu] < self.per_gpu
                and time.monotonic() - self._started.get(gpu, -1e9) >= BETWEEN_STARTS_S
            ]
            if not ready:
                return
            self._start(job, min(ready, key=lambda gpu: load[gpu]))

    def _start(self, job: Job, gpu: str) -> None:
        until = time.time() + self.until - time.monotonic() - GRACE_S
        command = job.command + (["--until", f"{until:.0f}"] if job.stops else [])
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
        with (self.logs / f"{job.name}.log").open("ab") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, env=environ, start_new_session=True
            )
        self._running.append(Running(job, gpu, process))
        self._started[gpu] = time.monotonic()
        print(f"{job.name}  starts on {f'GPU {gpu}' if gpu else 'the CPU'}", flush=True)

    def _collect(self) -> None:
        for running in [running for running in self._running if _has_ended(running)]:
            self._running.remove(running)
            status = _end(running)
            name = running.job.name
            if running.job.is_done:
                print(f"{name}  is done", flush=True)
            elif status == STOPPED:
                print(f"{name}  is to go on", flush=True)
                self._stopped.add(name)
            else:
                self.failures[name] = self.failures.get(name, 0) + 1
                log = (self.logs / f"{name}.log").read_text(errors="replace")
                print(f"{name}  failed with exit status {status}", file=sys.stderr)
                print("\n".join(log.splitlines()[-LOG_LINES:]), file=sys.stderr, flush=True)


def _has_ended(running: Running) -> bool:
    """Whether its process has; it is left unreaped, so that its group is still its own."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, running.process.pid, options) is not None


def _end(running: Running) -> int:
    """End all that a job has started, itself included; returns its exit status."""
    os.killpg(running.process.pid, signal.SIGKILL)
    return running.process.wait()
