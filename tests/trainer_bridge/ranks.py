"""Trainers of several ranks: processes of one job over gloo, on this machine."""

import faulthandler
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path

import torch
import torch.distributed as dist

from trainer_bridge.session.kept import KEPT

JOIN_S = 150.0
"""Seconds that a job may take, on a busy machine and with the imports of its processes."""
THREADS_S = 10.0
"""Seconds that threads of engines may take to notice that their trainer is gone."""
POLL_S = 0.02
IMPORTED = [
    __name__,
    "torch.distributed.fsdp",
    "transformers",
    "pytest",
    "tests.trainer_bridge.served",
]


def forkserver() -> ForkServerContext:
    """Forks processes from one that has imported torch and more, which takes each of them seconds.
    The first process of this pytest decides what that is, and which variables all have."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def run(
    worker: Callable[[int, Path], None],
    folder: Path,
    world: int,
    collective_timeout_s: float,
    join_s: float = JOIN_S,
    lost: int | None = None,
) -> None:
    """Run ``worker(rank, folder)`` in ``world`` processes; fail if one fails or hangs.

    Args:
        collective_timeout_s: a rank that is left waiting in a collective fails after this.
        lost: a rank that must be killed meanwhile; the others end well.
    """
    arguments = worker, str(folder), world, collective_timeout_s, join_s, lost is None
    processes = [
        forkserver().Process(target=_main, args=(rank, *arguments), name=f"rank {rank}")
        for rank in range(world)
    ]
    wanted = [-signal.SIGKILL if rank == lost else 0 for rank in range(world)]
    deadline = time.monotonic() + join_s
    try:
        for process in processes:
            process.start()
        while (ended := [process.exitcode for process in processes]) != wanted:
            assert all(code in (None, well) for code, well in zip(ended, wanted, strict=True)), (
                ended
            )
            assert time.monotonic() < deadline, "the ranks hang"
            time.sleep(POLL_S)
    finally:
        for process in processes:
            process.kill()
            process.join()


run_and_lose = run
"""Where a rank is lost."""


def die(*_: object) -> None:
    """End this process as the kernel does: no handler, no ``finally``, no farewell."""
    os.kill(os.getpid(), signal.SIGKILL)


def meet(rank: int, folder: Path, place: str, world: int) -> None:
    """Wait for all ranks, however short the timeout of a barrier would be."""
    (folder / f"{place}-{rank}").touch()
    while len(list(folder.glob(f"{place}-*"))) < world:
        time.sleep(POLL_S)


def _main(
    rank: int,
    worker: Callable[[int, Path], None],
    folder: str,
    world: int,
    collective_timeout_s: float,
    join_s: float,
    meets: bool,
) -> None:
    faulthandler.enable()  # where a rank is aborted, its log says where each thread was
    faulthandler.dump_traceback_later(0.9 * join_s)  # and where it hangs
    torch.set_num_threads(1)
    meet(rank, Path(folder), "imported", world)  # some take longer than the timeout below
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=collective_timeout_s),
    )
    try:
        worker(rank, Path(folder))
        if meets:
            meet(rank, Path(folder), "ended", world)
    finally:
        faulthandler.cancel_dump_traceback_later()
        dist.destroy_process_group()
        _end_threads()


def _end_threads() -> None:
    """End the connections, and with them the threads of engines in this process: torch aborts a
    process ("terminate called without an active exception") one of whose threads is inside of
    torch when the interpreter ends."""
    KEPT.close_all()
    deadline = time.monotonic() + THREADS_S
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
