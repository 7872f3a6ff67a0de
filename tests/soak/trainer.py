"""Trainers: one whose weights stay where they are, and one that is killed while it sends."""

import multiprocessing
import os
import signal
import socket
from multiprocessing.connection import Connection
from typing import Any

from tests.gpu.policies import Tensors
from tests.soak import bridge
from tests.soak.settings import SETTINGS, draw
from tests.soak.wire import Wire

DEATH_TIMEOUT_S = 120.0
"""A child on a GPU makes a CUDA context first."""
_forkserver = multiprocessing.get_context("forkserver")


class Trainer:
    """Weights that stay at their addresses from policy to policy."""

    def __init__(self, policies: list[Tensors]) -> None:
        self._policies = policies
        self._weights = {name: tensor.clone() for name, tensor in policies[0].items()}

    def become(self, policy: int) -> Tensors:
        """Write a policy into the weights; returns them."""
        for name, tensor in self._weights.items():
            tensor.copy_(self._policies[policy][name])
        return dict(self._weights)


def _update(
    report: Connection, device: str, address: str, policy: int, version: int, how: str, at: int
) -> None:
    def die(wire: Wire, peer: socket.socket) -> None:
        report.send(wire.chunks)
        os.kill(os.getpid(), signal.SIGKILL)

    with Wire(at, die).tapped():
        bridge.update(draw(SETTINGS[device].shape, policy, device), address, version, how)


def killed_at(byte: int, device: str, address: str, policy: int, version: int, how: str) -> int:
    """Update from a process that is killed when it has sent so many bytes; its whole chunks.

    Raises:
        RuntimeError: it ended otherwise.
    """
    # a child is forked from a process that has imported torch, and has used no device
    _forkserver.set_forkserver_preload([__name__])
    here, there = _forkserver.Pipe(duplex=False)
    arguments: tuple[Any, ...] = there, device, address, policy, version, how, byte
    child = _forkserver.Process(target=_update, args=arguments, name="trainer to be killed")
    child.start()
    there.close()
    try:
        child.join(DEATH_TIMEOUT_S)
        if child.exitcode != -signal.SIGKILL or not here.poll():
            raise RuntimeError(f"the trainer was not killed: it ended with {child.exitcode}")
        return int(here.recv())
    finally:
        child.kill()
        child.join()
        child.close()
        here.close()
