"""Trainers: one whose weights stay where they are, and some in processes of their own."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import torch

import trainer_bridge
from sgl_fp8rl.protocol import framing
from tests.gpu.policies import Shape, Tensors, draw

ANSWER_S = 120.0
"""A trainer's first answer waits for torch's import, a CUDA context and a policy."""


class Trainer:
    """BF16 weights on the GPU that stay where they are from policy to policy."""

    def __init__(self, shape: Shape) -> None:
        self.tensors: Tensors = {
            name: torch.empty(size, dtype=torch.bfloat16, device="cuda")
            for name, size in shape.tensors()
        }

    def become(self, policy: Tensors) -> Tensors:
        """Write a policy into the weights; returns them."""
        for name, tensor in self.tensors.items():
            tensor.copy_(policy[name])
        return self.tensors


@contextmanager
def trainer_process(
    target: Callable[..., None], *args: Any, environment: dict[str, str] | None = None
) -> Iterator[tuple[Any, Connection]]:
    """A process that runs ``target(connection, *args)``; it is killed at the end."""
    spawn = multiprocessing.get_context("spawn")
    connection, other = spawn.Pipe()
    process = spawn.Process(target=target, args=(other, *args), name="trainer under test")
    with patch.dict(os.environ, environment or {}):
        process.start()
    other.close()
    try:
        yield process, connection
    finally:
        process.kill()
        process.join()
        connection.close()


def answer(connection: Connection) -> Any:
    """The next message of a trainer's process; its own error is on standard error."""
    assert connection.poll(ANSWER_S), "the trainer did not answer"
    return connection.recv()


def update_twice(
    connection: Connection, address: str, shape: Shape, seed: int, version: int, run: str
) -> None:
    """Send the same tensors as two versions; tell whether torch's memory is expandable, and what
    was read in place each time."""
    tensors = draw(shape, seed)
    expandable = all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
    mapped = [
        trainer_bridge.update(tensors, address, version=v, run=run).mapped_bytes
        for v in (version, version + 1)
    ]
    connection.send((expandable, mapped))


def stop_at_part(
    connection: Connection, address: str, shape: Shape, seed: int, version: int, chunk: int
) -> None:
    """Update, but stop for ever where chunk number ``chunk``, from 0 on, would be sent."""
    send, sent = framing.send, 0

    def send_some(peer: Any, message: dict[str, Any], *rest: Any) -> None:
        nonlocal sent
        if message.get("op") == "chunk":
            if sent == chunk:
                connection.send(None)
                threading.Event().wait()
            sent += 1
        send(peer, message, *rest)

    with patch.object(framing, "send", send_some):
        trainer_bridge.update(draw(shape, seed), address, version=version)
