"""Engines and servers in processes that are forked from one which has imported SGLang.

SGLang spawns an engine's processes, and each imports it anew: a minute of a slow core for an engine
that is then tested for a few seconds. The plugin is not loaded before the fork: that is done where
an engine starts, as ever.
"""

import atexit
import multiprocessing
import multiprocessing.context
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

CONTEXT = multiprocessing.get_context("forkserver")
# the first process of this pytest decides for all; killed trainers of the soak are forked too
IMPORTED = ["tests.engine.preloaded", "tests.soak.trainer"]


class Forked:
    """A process that leads a group of its own, with as much of ``Popen`` as the tests need.

    Args:
        log: file for all that it prints.
        environment: all of its variables.
        run: what it does, with these arguments.
        anew: import SGLang anew, as its own processes do, for variables that it reads meanwhile;
            always so where there is a GPU.
    """

    def __init__(
        self,
        log: Path,
        environment: Mapping[str, str],
        run: Callable[..., None],
        *arguments: Any,
        anew: bool = False,
    ) -> None:
        CONTEXT.set_forkserver_preload(IMPORTED)
        # importing SGLang uses a GPU where there is one, and CUDA does not outlive a fork
        anew = anew or torch.cuda.is_available()
        context = multiprocessing.get_context("spawn") if anew else CONTEXT
        everything = log, dict(environment), run, arguments, anew
        self._process = context.Process(target=_become, args=everything, name="under test")
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self._process.exitcode


def pipe() -> tuple[Connection, Connection]:
    """Both ends of a pipe, of which a forked process may be given one."""
    return CONTEXT.Pipe()


def run_module(module: str, arguments: list[str]) -> None:
    """``python -m``, in this process."""
    sys.argv = [module, *arguments]
    # as the main module, where SGLang's hooks find the names that it imported
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _become(
    log: Path,
    environment: dict[str, str],
    run: Callable[..., None],
    arguments: tuple[Any, ...],
    anew: bool,
) -> None:
    os.setsid()
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    if not anew:
        # SGLang asks for "spawn", and its processes would import everything again
        contexts: dict[str, object] = vars(multiprocessing.context)["_concrete_contexts"]
        contexts["spawn"] = multiprocessing.get_context("fork")
    # multiprocessing waits for children at its end, and calls nothing that is registered for the
    # exit, by which SGLang ends its own
    atexit._clear()  # what was registered before the fork
    try:
        run(*arguments)
    finally:
        atexit._run_exitfuncs()
