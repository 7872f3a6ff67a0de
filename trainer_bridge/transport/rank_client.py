"""The private sockets of an engine's ranks: what is said to one is said to all."""

import socket
from typing import Any

from sgl_fp8rl.protocol import framing
from trainer_bridge.engine_client import EngineError

SOCKET_TIMEOUT_S = 600.0
"""Seconds that a rank may take over one half of the bucket."""


class RankClients:
    """Connections to all ranks of one engine for one session.

    Raises:
        EngineError: a rank refused a step, or is gone.
    """

    def __init__(self, paths: list[str], token: str) -> None:
        self._sockets: list[socket.socket] = []
        known: list[set[str]] = []
        try:
            for path in paths:
                rank, reply = _connect(path, token)
                self._sockets.append(rank)
                known.append(set(reply.get("known", ())))
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

    def wait(self) -> list[dict[str, Any]]:
        """The next reply of each."""
        replies = []
        for rank in self._sockets:
            try:
                reply, _ = framing.receive(rank)
            except OSError as error:
                raise EngineError(
                    f"the engine ended the update ({error}); see its log for the reason"
                ) from error
            if "error" in reply:
                raise EngineError(reply["error"])
            replies.append(reply)
        return replies

    def close(self) -> None:
        """Hang up; a session that was not committed ends with it."""
        for rank in self._sockets:
            rank.close()


def _connect(path: str, token: str) -> tuple[socket.socket, dict[str, Any]]:
    rank = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    rank.settimeout(SOCKET_TIMEOUT_S)
    try:
        rank.connect(path)
        framing.send(rank, {"token": token})
        reply, _ = framing.receive(rank)
    except OSError as error:
        rank.close()
        raise EngineError(
            f"the engine's update socket cannot be reached ({error}); trainer and engine must run "
            f"on one host, as the same user"
        ) from error
    if "error" in reply:
        rank.close()
        raise EngineError(reply["error"])
    return rank, reply
