"""Compile kernels in parallel processes on one GPU, into a shared cache."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

MAX_PROCESSES = 16
PROCESS_BYTES = 1 << 30
"""A CUDA context and its libraries, about 0.6 GB, rounded up."""
TIMEOUT_S = 300.0


def process_limit(tasks: int, bytes_each: int, device: int) -> int:
    """How many processes to start: one per core, within half of the device's free memory.

    Args:
        tasks: upper bound of the number.
        bytes_each: device memory for the tensors of one process.
    """
    cores = len(os.sched_getaffinity(0))
    free, _ = torch.cuda.mem_get_info(device)
    return min(MAX_PROCESSES, cores, tasks, free // 2 // (PROCESS_BYTES + bytes_each))


def run_shares(module: str, shares: Sequence[Any]) -> str | None:
    """Run ``python -m module SHARE`` in parallel for each share, in JSON.

    Returns:
        The last line of output of a process that failed, or None.
    """
    # the children import from the same paths as this process
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    deadline = time.monotonic() + TIMEOUT_S
    children: list[subprocess.Popen[str]] = []
    failure = None
    try:
        for share in shares:
            children.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, json.dumps(share)],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        for child in children:
            said, _ = child.communicate(timeout=max(0.0, deadline - time.monotonic()))
            if child.returncode != 0:
                failure = said.strip().rpartition("\n")[2] or f"exit status {child.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = str(error)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.communicate()
    return failure
