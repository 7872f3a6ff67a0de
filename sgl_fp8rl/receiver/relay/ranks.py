"""The ranks of an engine as its relay reaches them: by their private sockets, all at once."""

import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from threading import Lock
from typing import Any, NamedTuple

from sgl_fp8rl.protocol import framing


class PendingRequest(NamedTuple):
    """A request that ranks have still to answer."""

    op: str
    by: socket.socket
    """Who awaits the answers."""


class RelayRanks:
    """Sends each message to every rank, for several threads; answers come in the same order."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []
        self._asking = Lock()
        self._pending: deque[PendingRequest] = deque()
        """In the order in which ranks were asked."""

    def connect(
        self, stack: ExitStack, paths: Sequence[str], token: str
    ) -> tuple[list[set[str]], set[str]]:
        """Connect to every rank, until ``stack`` closes; OSError or ValueError if one is gone.

        Returns:
            the names of the memory that each has open, and of the updates that they hold.
        """
        known: list[set[str]] = []
        snapshots: set[str] = set()
        for path in paths:
            rank = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            rank.connect(path)
            framing.send(rank, {"token": token})
            reply, _ = framing.receive(rank)
            known.append(set(reply.get("known", ())))
            snapshots.add(reply.get("snapshot", ""))
            self._sockets.append(rank)
        return known, snapshots

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message that has no answer."""
        with self._asking:
            self._send(message, ())

    def ask(
        self, message: dict[str, Any], by: socket.socket, fds: tuple[int, ...] = (), op: str = ""
    ) -> None:
        """Send a message.

        Args:
            by: who awaits the answers.
            op: what they are to, by default the message's own.
        """
        with self._asking:
            self._pending.append(PendingRequest(op or str(message.get("op")), by))
            self._send(message, fds)

    def _send(self, message: dict[str, Any], fds: tuple[int, ...]) -> None:
        for rank in self._sockets:
            with suppress(OSError):  # it ended the session, and has said why
                framing.send(rank, message, fds)

    def answers(
        self, unasked: socket.socket
    ) -> Iterator[tuple[PendingRequest, list[dict[str, Any]]]]:
        """What each answers, in rank order, until a rank hangs up.

        Args:
            unasked: who is told what nobody asked.
        """
        with suppress(OSError):
            while True:
                replies = [framing.receive(rank)[0] for rank in self._sockets]
                pending = self._pending
                yield pending.popleft() if pending else PendingRequest("", unasked), replies

    def hang_up(self) -> None:
        """Send nothing any more."""
        for rank in self._sockets:
            with suppress(OSError):
                rank.shutdown(socket.SHUT_WR)
