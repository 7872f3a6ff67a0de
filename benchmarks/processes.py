"""Run a command in a process group of its own, and learn how it ended even if it is killed."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

POLL_S = 0.1
LOG_LINES = 40
"""Of a job that failed: so many are printed."""
CRASH = "Scheduler hit an exception"
"""SGLang's scheduler logs this before the traceback, and its parent then kills itself."""
_EXCEPTION = re.compile(
    # torch puts the rank before each line of a trainer's traceback
    r"^(?:\[rank\d+\]: )?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)(?:: .*)?)$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Outcome:
    """How a process ended: with its output, or with a sentence that says why there is none."""

    output: Any
    """The JSON that the process wrote, or None."""
    failure: str | None
    log: str
    """Its standard output and error."""


def run(
    command: list[str],
    output: Path,
    log: Path,
    limit_s: float,
    environ: Mapping[str, str],
    cwd: Path,
) -> Outcome:
    """Run ``command`` until it ends or ``limit_s`` have passed, and end what it left behind.

    It writes its JSON to ``output``. Its log is a file, not a pipe: a scheduler that outlives its
    parent keeps a pipe open.
    """
    deadline = time.monotonic() + limit_s
    with log.open("wb") as out:
        status = finish(command, out, environ, cwd, lambda: time.monotonic() > deadline)
    text = log.read_text(errors="replace")
    if status == 0 and output.exists():
        return Outcome(json.loads(output.read_text()), None, text)
    how = f"did not end within {limit_s:.0f} s" if status is None else _how(status)
    return Outcome(None, f"{how}: {exception_in(text) or 'its log names no exception'}", text)


def finish(
    command: Sequence[str],
    out: BinaryIO,
    environ: Mapping[str, str],
    cwd: Path,
    is_over: Callable[[], bool],
) -> int | None:
    """Run ``command`` until it ends or ``is_over``, and end what it left behind; returns its exit
    status, or None where it had not ended."""
    process = subprocess.Popen(
        command, stdout=out, stderr=out, env=dict(environ), cwd=cwd, start_new_session=True
    )
    try:
        has_ended = _wait(process.pid, is_over)
    finally:
        # its leader is not reaped yet, so the group is still the one that was started here
        os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
    return status if has_ended else None


def engine_environment(stock: bool, changes: Mapping[str, str]) -> dict[str, str]:
    """Of a process with an engine; a stock one loads no plugin."""
    # what is timed was run before, so kernels need not be compiled ahead
    environ = {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0", **os.environ}
    if stock:
        environ["SGLANG_PLUGINS"] = "none"
    return environ | dict(changes)


def exception_in(log: str) -> str | None:
    """The exception's line in a log: the first after SGLang's scheduler crashed, else the last."""
    before, crash, after = log.partition(CRASH)
    found = _EXCEPTION.findall(after if crash else before)
    return (found[0] if crash else found[-1]) if found else None


def _wait(pid: int, is_over: Callable[[], bool]) -> bool:
    """Whether the process ended in time; it is left unreaped."""
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if is_over():
            return False
        time.sleep(POLL_S)
    return True


def _how(status: int) -> str:
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    return f"exit status {status}" if status else "ended without output"
