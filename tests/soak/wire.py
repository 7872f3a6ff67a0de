"""The bytes that a trainer sends to a rank: something happens at one of them."""

import json
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from sgl_fp8rl.protocol import framing

_send = framing.send
Act = Callable[["Wire", socket.socket], None]


class Wire:
    """Counts what is sent, and acts once, when ``at`` bytes are on their way.

    Args:
        at: bytes of all messages so far, or None to count only.
        act: is called with the socket; what is left of the message is sent after it.
    """

    def __init__(self, at: int | None = None, act: Act | None = None) -> None:
        self.sent = 0
        self.chunks = 0
        """Messages that had the engine write, and were sent whole."""
        self._at, self._act = at, act

    @contextmanager
    def tapped(self) -> Iterator["Wire"]:
        """Everything that this process sends passes here."""
        with patch.object(framing, "send", self._pass_on):
            yield self

    def _pass_on(
        self, peer: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()
    ) -> None:
        body = json.dumps(message).encode()
        frame = struct.pack("!I", len(body)) + body
        part = None if self._at is None else self._at - self.sent
        self.sent += len(frame)
        if self._act is None or part is None or not 0 <= part < len(frame):
            _send(peer, message, fds)
        elif fds:  # descriptors travel with the first byte
            self._act(self, peer)
            _send(peer, message, fds)
        else:
            peer.sendall(frame[:part])
            self._act(self, peer)
            peer.sendall(frame[part:])
        self.chunks += message.get("op") == "chunk"
