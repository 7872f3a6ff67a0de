"""The ranks of an engine on another host, through the one connection of its relay."""

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sgl_fp8rl.protocol import framing
from sgl_fp8rl.protocol.values import are_names, excerpt
from trainer_bridge.engine_client import EngineError, sentence_of
from trainer_bridge.transport.rank_client import Content


class RelayClient:
    """The same of ``RankClients``, over TCP: what is in the bucket is sent with each chunk.

    Args:
        where: the relay's port, and the host that the engine listens at.
        host: by which this process reaches the engine, where it knows; else the engine's own.
        timeout_s: seconds that a rank may take over a step.

    Raises:
        EngineError: the relay cannot be reached, or a rank refused a step.
    """

    def __init__(self, where: Any, token: Any, host: str | None, timeout_s: float) -> None:
        sound = isinstance(where, dict) and type(where.get("port")) is int
        if not sound or not isinstance(where.get("host"), str) or not isinstance(token, str):
            raise EngineError(
                f"the engine names {excerpt(where)} as its relay; install the same sgl-fp8rl on "
                f"both sides"
            )
        address = host or where["host"], where["port"]
        try:
            self._socket = socket.create_connection(address, timeout_s)
        except OSError as error:
            raise EngineError(
                f"the engine's relay at {address[0]}:{address[1]} cannot be reached ({error}); "
                f"open the engine's ports to this host, and start it with --host"
            ) from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            framing.send(self._socket, {"token": token})
            reply = self._receive()
        except OSError as error:
            self.close()
            raise EngineError(f"the engine's relay hung up ({error}); see its log") from error
        if "error" in reply or not are_names(reply.get("known")):
            self.close()
            raise EngineError(sentence_of(reply.get("error", "the relay names no memory")))
        self.known = set(reply["known"])
        """Names of the memory that every rank has open."""

    def ask(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        """Send a message to all and wait for their replies, in rank order."""
        self.send(message, fds)
        return self.wait()

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        """Send a message to all; the relay opens memory of its own."""
        with suppress(OSError):  # it ended the session; its last reply says why
            framing.send(self._socket, message)

    def send_chunk(self, message: dict[str, Any], content: Callable[[], Content]) -> None:
        """Send a chunk, and what it holds."""
        offset, data = content()
        with suppress(OSError):
            framing.send(self._socket, {**message, "offset": offset, "bytes": len(data)})
            self._socket.sendall(data)

    def wait(self) -> list[dict[str, Any]]:
        """The next reply of each."""
        try:
            replies = self._receive().get("replies")
        except OSError as error:
            raise EngineError(
                f"the engine ended the update ({error}); see its log for the reason"
            ) from error
        if not isinstance(replies, list) or not all(isinstance(each, dict) for each in replies):
            raise EngineError("the engine's relay passed no replies on; install one sgl-fp8rl")
        for reply in replies:
            if "error" in reply:
                raise EngineError(sentence_of(reply["error"]))
        return replies

    def hang_up(self) -> None:
        """Have every rank let go of the bucket, without waiting for it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def detach(self, timeout_s: float) -> None:
        """Hang up, and wait until every rank has let go."""
        self.hang_up()
        deadline = time.monotonic() + timeout_s
        with suppress(OSError):
            while (left := deadline - time.monotonic()) > 0:
                self._socket.settimeout(left)
                if not self._socket.recv(1 << 16):
                    break
        self.close()

    def close(self) -> None:
        """Hang up; a session that was not committed ends with it."""
        self._socket.close()

    def _receive(self) -> dict[str, Any]:
        reply, fds = framing.receive(self._socket)
        for fd in fds:
            os.close(fd)
        return reply
