"""The private sockets of an engine's ranks: what is said to one is said to all."""

import os
import socket
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Protocol

from sgl_fp8rl.protocol import framing
from sgl_fp8rl.protocol.values import are_names
from trainer_bridge.engine_client import EngineError, sentence_of

SOCKET_TIMEOUT_S = 600.0
"""Seconds that a rank may take over one chunk."""
DETACH_TIMEOUT_S = 10.0
"""Seconds that an engine may take to let go of a trainer that leaves: until the end of a step."""


Content = tuple[int, memoryview]
"""What a chunk holds, and where it lies: bytes from the start of the bucket."""


class UnreachableMemoryError(EngineError):
    """The engine cannot open this process's GPU memory; nothing was written."""


class Ranks(Protocol):
    """Ranks of one engine or of several, to which memory is shown."""

    @property
    def known(self) -> Collection[str]:
        """Names of the shared memory that every rank has open."""

    def ask(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        """Send a message to all and wait for their replies."""


class RankClients:
    """Connections to all ranks of one engine, for one session and until the next one commits.

    Args:
        timeout_s: seconds that a rank may take over a step.

    Raises:
        EngineError: a rank refused a step, or is gone.
    """

    def __init__(self, paths: Any, token: Any, timeout_s: float = SOCKET_TIMEOUT_S) -> None:
        if not are_names(paths) or not paths or not isinstance(token, str):
            raise EngineError(
                "the engine began an update without naming its sockets; install the same sgl-fp8rl "
                "on both sides"
            )
        self._sockets: list[socket.socket] = []
        known: list[set[str]] = []
        try:
            for path in paths:
                rank, reply = _connect(path, token, timeout_s)
                self._sockets.append(rank)
                known.append(set(reply.get("known", [])))
        except EngineError:
            self.close()  # or ranks that did connect would wait for what never comes
            raise
        self.known = set.intersection(*known)
        """Names of the shared memory that every rank has open."""

    def ask(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        """Send a message to all and wait for their replies, in rank order."""
        self.send(message, fds)
        return self.wait()

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send a message to all."""
        for rank in self._sockets:
            try:
                framing.send(rank, message, fds)
            except OSError:
                continue  # it ended the session; its last reply says why

    def send_chunk(self, message: dict[str, Any], content: Callable[[], Content]) -> None:
        """Send a chunk, whose content they read where it lies."""
        self.send(message)

    def wait(self) -> list[dict[str, Any]]:
        """The next reply of each."""
        replies = []
        for rank in self._sockets:
            try:
                reply = _receive(rank)
            except OSError as error:
                raise EngineError(
                    f"the engine ended the update ({error}); see its log for the reason"
                ) from error
            replies.append(reply)
        return replies

    def hang_up(self) -> None:
        """Have every rank let go of this process's memory, without waiting for it."""
        for rank in self._sockets:
            with suppress(OSError):  # it is gone, and so are its mappings
                rank.shutdown(socket.SHUT_WR)

    def detach(self, timeout_s: float) -> None:
        """Hang up, and wait until every rank has let go of this process's memory."""
        self.hang_up()
        deadline = time.monotonic() + timeout_s
        for rank in self._sockets:
            rank.settimeout(max(deadline - time.monotonic(), 1e-3))
            with suppress(OSError):  # or it is busy with another trainer's update
                rank.recv(1)  # it hangs up when it has let go
        self.close()

    def close(self) -> None:
        """Hang up; a session that was not committed ends with it."""
        for rank in self._sockets:
            rank.close()


def _connect(path: str, token: str, timeout_s: float) -> tuple[socket.socket, dict[str, Any]]:
    rank = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    rank.settimeout(timeout_s)
    try:
        rank.connect(path)
        framing.send(rank, {"token": token})
        reply = _receive(rank)
        if not are_names(reply.get("known", [])):
            raise EngineError(
                "a rank of the engine does not say what memory it has open; install the same "
                "sgl-fp8rl on both sides"
            )
    except EngineError:
        rank.close()
        raise
    except OSError as error:
        rank.close()
        raise EngineError(
            f"the engine's update socket cannot be reached ({error}); trainer and engine must run "
            f"on one host, as the same user"
        ) from error
    return rank, reply


def _receive(rank: socket.socket) -> dict[str, Any]:
    reply, fds = framing.receive(rank)
    for fd in fds:
        os.close(fd)  # no reply brings any
    if "error" in reply:
        on_host = framing.RETRY_ON_HOST.items() <= reply.items()
        raise (UnreachableMemoryError if on_host else EngineError)(sentence_of(reply["error"]))
    return reply
