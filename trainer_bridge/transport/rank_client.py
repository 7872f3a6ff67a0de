"""The private sockets of an engine's ranks: each message goes to all of them."""

import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from sgl_fp8rl.protocol import framing
from sgl_fp8rl.protocol.snapshot import Change
from sgl_fp8rl.protocol.values import are_names
from trainer_bridge.engines.engine_client import EngineError, check_fields, sentence_of

SOCKET_TIMEOUT_S = 600.0
"""Seconds that a rank may take over one chunk."""
LEAST_WAIT_S = 1.0
"""Seconds for a reply of an engine while others used up the time of the step."""
DETACH_TIMEOUT_S = 10.0
"""Seconds that an engine may take to let go of a trainer that leaves: until the end of a step."""


class Content(NamedTuple):
    """A chunk, for ranks that do not share the bucket."""

    offset: int
    """Bytes from the start of the bucket."""
    data: torch.Tensor
    """uint8: what it holds, in host memory; on a GPU where only ``change`` is sent."""
    before: str = ""
    """The snapshot that ``change`` is of."""
    change: Change | None = None


class UnreachableMemoryError(EngineError):
    """The engine cannot open this process's GPU memory; nothing was written."""


class SlowEngineError(EngineError):
    """A rank took too long over a step."""


class EngineRanks(ABC):
    """All ranks of one engine, connected for one session and until the next one commits.

    Methods raise EngineError where a rank refused a step, or is gone.
    """

    def __init__(self, timeout_s: float) -> None:
        self.known: set[str] = set()
        """Names of the shared memory that every rank has open."""
        self.snapshot: str | None = None
        """The name of the snapshot that is kept of the last update, on another host; None where
        none is kept."""
        self.snapshot_bytes = 0
        """How large a snapshot may be."""
        self.next_snapshot = ""
        """What it is called after this update."""
        self.network_bytes = 0
        """Bytes of chunks that were sent over a network."""
        self.timeout_s = timeout_s
        self._sockets: list[socket.socket] = []

    @abstractmethod
    def send_chunk(self, message: dict[str, Any], content: Content | None) -> None:
        """Send a chunk.

        Args:
            content: what it holds, for ranks that do not share the bucket; None where all do.
        """

    @abstractmethod
    def wait(self, began: float | None = None) -> list[dict[str, Any]]:
        """The next reply of each rank, in rank order.

        Args:
            began: when the step began (``time.monotonic``), by default now: engines that hang are
                waited for together, not one after the other.
        """

    def _next_reply(self, sock: socket.socket, began: float | None) -> dict[str, Any]:
        late = 0.0 if began is None else time.monotonic() - began
        try:
            sock.settimeout(max(self.timeout_s - late, min(self.timeout_s, LEAST_WAIT_S)))
            return receive(sock)
        except TimeoutError as error:
            raise SlowEngineError(
                f"the engine took longer than {self.timeout_s:.0f} s over a step of the update; "
                f"see its log"
            ) from error
        except OSError as error:
            raise EngineError(
                f"the engine ended the update ({error}); see its log for the reason"
            ) from error

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send a message to all."""
        for each in self._sockets:
            with suppress(OSError):  # it ended the session; its last reply says why
                framing.send(each, message, fds)

    def ask(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        """Send a message to all and wait for their replies, in rank order."""
        self.send(message, fds)
        return self.wait()

    def hang_up(self) -> None:
        """Have every rank let go of this process's memory, without waiting for it."""
        for each in self._sockets:
            with suppress(OSError):  # it is gone, and so are its mappings
                each.shutdown(socket.SHUT_WR)

    def detach(self, timeout_s: float) -> None:
        """Hang up, and wait until every rank has let go of this process's memory."""
        self.hang_up()
        deadline = time.monotonic() + timeout_s
        for each in self._sockets:
            with suppress(OSError):  # or it is busy with another trainer's update
                while True:  # what it still says is not read
                    each.settimeout(max(deadline - time.monotonic(), 1e-3))
                    if not each.recv(1 << 16):
                        break  # it hangs up when it has let go
        self.close()

    def close(self) -> None:
        """Hang up; a session that was not committed ends with it."""
        for each in self._sockets:
            each.close()


class RankClients(EngineRanks):
    """Each rank of an engine on this host, by a Unix socket of its own."""

    def __init__(self, paths: Any, token: Any, timeout_s: float = SOCKET_TIMEOUT_S) -> None:
        sound = {"sockets": bool(paths) and are_names(paths), "token": isinstance(token, str)}
        check_fields("a session of the engine", {"sockets": paths, "token": token}, sound)
        super().__init__(timeout_s)
        try:
            for path in paths:
                self._sockets.append(_connect(path, token, timeout_s))
            # when all have been asked: each rank takes a while to answer
            self.known = set.intersection(*map(_known, self._sockets))
        except EngineError:
            self.close()  # or ranks that did connect would wait for what never comes
            raise

    def send_chunk(self, message: dict[str, Any], content: Content | None) -> None:
        self.send(message)

    def wait(self, began: float | None = None) -> list[dict[str, Any]]:
        return [self._next_reply(rank, began) for rank in self._sockets]


class Member(Protocol):
    """An engine in an update."""

    ranks: EngineRanks | None
    """Its ranks, while its session is open."""


M = TypeVar("M", bound=Member)


class Engines(Generic[M]):
    """The engines of an update, as if they were one.

    Args:
        lose: called with an engine that failed; it raises where the update cannot go on without.
    """

    def __init__(self, members: list[M], lose: Callable[[M, EngineError], None]) -> None:
        self._members, self._lose = members, lose

    @property
    def open(self) -> list[tuple[M, EngineRanks]]:
        """The engines whose session is open, with their ranks."""
        return [(member, member.ranks) for member in self._members if member.ranks is not None]

    @property
    def ranks(self) -> list[EngineRanks]:
        return [ranks for _, ranks in self.open]

    @property
    def known(self) -> set[str]:
        """Names of the shared memory that every rank of every engine has open."""
        known = [ranks.known for ranks in self.ranks]
        return set.intersection(*known) if known else set()

    def ask(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        """Send a message to every rank of every engine and wait for their replies."""
        for ranks in self.ranks:
            ranks.send(message, fds)
        return self.wait()

    def wait(self) -> list[dict[str, Any]]:
        """The next reply of every rank; an engine that has none is lost."""
        replies: list[dict[str, Any]] = []
        began = time.monotonic()
        for member, ranks in self.open:
            try:
                replies += ranks.wait(began)
            except EngineError as error:
                self._lose(member, error)
        return replies


def receive(sock: socket.socket) -> dict[str, Any]:
    """The next reply at one of an engine's sockets.

    Raises:
        EngineError: it is an error.
        OSError: there is none.
    """
    reply, fds = framing.receive(sock)
    for fd in fds:
        os.close(fd)  # no reply brings any
    check(reply)
    return reply


def check(reply: dict[str, Any]) -> None:
    """Raise the error that a rank replied, if it is one."""
    if "error" in reply:
        on_host = framing.RETRY_ON_HOST.items() <= reply.items()
        raise (UnreachableMemoryError if on_host else EngineError)(sentence_of(reply["error"]))


def _connect(path: str, token: str, timeout_s: float) -> socket.socket:
    rank = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    rank.settimeout(timeout_s)
    try:
        rank.connect(path)
        framing.send(rank, {"token": token})
    except (OSError, ValueError) as error:  # ValueError: no valid path
        rank.close()
        raise _unreachable(error) from error
    return rank


def _known(rank: socket.socket) -> set[str]:
    """Names of the memory that a rank has open, its first reply."""
    try:
        reply = {"known": [], **receive(rank)}
    except OSError as error:
        raise _unreachable(error) from error
    check_fields("a rank's reply", reply, {"known": are_names(reply["known"])})
    return set(reply["known"])


def _unreachable(error: Exception) -> EngineError:
    return EngineError(
        f"the engine's update socket cannot be reached ({error}); trainer and engine must run on "
        f"one host, as the same user"
    )
