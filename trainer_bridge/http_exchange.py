"""One HTTP request and its reply on a connection, in parts: nothing here waits.

``http.client`` writes the request and reads the reply, both in memory; this module only has to see
where a reply ends.
"""

import http.client
import io
import re
import selectors
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

RECEIVE_BYTES = 1 << 16
"""At most, before the other connections have their turn; more than a TLS record, whose rest the
selector would not report."""
LONGEST_HEAD = 1 << 18
"""Bytes of a reply's status line and headers."""
LONGEST_REPLY = 1 << 32
"""Bytes of a reply: more than a response of a million tokens of Qwen3-235B-A22B has, each with its
logprob and policy (about 80 bytes) and 8 experts of each of 94 layers (4011 bytes)."""
_CONTINUE = re.compile(rb"HTTP/1\.. 100\b")
"""Begins a head that is not yet the reply's."""
_EMPTY_LINE = re.compile(rb"\n\r?\n")
_WOULD_WAIT = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

Answer = tuple[int, bytes]
"""HTTP status and body."""
Fault = OSError | http.client.HTTPException
"""What kept an answer from coming."""


class ReplyTooLongError(http.client.HTTPException):
    """A reply has more than LONGEST_REPLY bytes, or announces them."""

    def __init__(self) -> None:
        super().__init__(f"a reply of more than {LONGEST_REPLY} bytes")


def post(path: str, body: bytes, headers: Mapping[str, str]) -> bytearray:
    """The bytes of a POST request; ``headers`` name the host."""
    request = _Request("")
    request.request("POST", path, body, headers)
    return request.written


class Exchange:
    """A request, which it begins to send, and its reply.

    Raises:
        OSError: the connection failed at once.
    """

    def __init__(self, sock: socket.socket, request: bytearray) -> None:
        self.sock = sock
        self._unsent = memoryview(request)
        self._reply = _Reply()
        sock.setblocking(False)
        self._send()

    @property
    def events(self) -> int:
        """What the selector is to report."""
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)

    def advance(self) -> Answer | Fault | None:
        """Receive and send a part; returns how the exchange ended, or None if it goes on."""
        try:
            with suppress(*_WOULD_WAIT):
                answer = self._reply.add(self.sock.recv(RECEIVE_BYTES))
                if answer is not None:
                    return answer
            self._send()
        except (OSError, http.client.HTTPException) as fault:
            return fault
        return None

    def _send(self) -> None:
        if self._unsent:
            with suppress(*_WOULD_WAIT):
                sent = self.sock.send(self._unsent)
                self._unsent = self._unsent[sent:] or memoryview(b"")  # frees what is sent


class _Reply:
    """Collects the bytes of a reply; ``http.client`` reads them once all are there."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._begins = self._searched = 0
        """Where its head begins, and how far the end of that was looked for."""
        self._head: http.client.HTTPResponse | None = None
        self._size: int | None = None

    def add(self, data: bytes) -> Answer | None:
        """Take what came, b"" where the connection ended; returns the answer if that is all.

        Raises:
            http.client.HTTPException: it is not HTTP, it ended too soon, or it is too long.
        """
        self._received += data
        if not data:
            return self._read()
        if self._head is None and self._has_head():
            content = io.BytesIO(self._received)
            self._head = _begin(content)
            if self._head.length is not None:
                self._size = content.tell() + self._head.length
        if max(len(self._received), self._size or 0) > LONGEST_REPLY:
            raise ReplyTooLongError
        if self._size is not None and len(self._received) >= self._size:
            return self._read()
        if self._head is not None and self._head.chunked and self._received.endswith(b"\r\n\r\n"):
            with suppress(http.client.IncompleteRead):  # a chunk may end so as well
                return self._read()
        return None

    def _has_head(self) -> bool:
        while (empty := _EMPTY_LINE.search(self._received, self._searched)) is not None:
            if _CONTINUE.match(self._received, self._begins) is None:
                return True
            self._begins = self._searched = empty.end()
        self._searched = max(self._begins, len(self._received) - 2)  # an empty line may have begun
        if len(self._received) > LONGEST_HEAD:
            raise http.client.HTTPException(f"no reply begins within {LONGEST_HEAD} bytes")
        # what is not HTTP may have no headers; http.client refuses its first line
        begun = len(self._received) - self._begins
        return not self._received.startswith(b"HTTP/"[:begun], self._begins)

    def _read(self) -> Answer:
        response = _begin(io.BytesIO(self._received))
        try:
            return response.status, response.read()
        except OverflowError as error:
            raise http.client.HTTPException(f"a part has an impossible length ({error})") from error


class _Request(http.client.HTTPConnection):
    """Writes a request to memory."""

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self.written = bytearray()

    def send(self, data: Any) -> None:
        self.written += data


def _begin(content: io.BytesIO) -> http.client.HTTPResponse:
    """Read the status line and the headers."""

    class File:
        def makefile(self, mode: str) -> io.BytesIO:
            return content

    response = http.client.HTTPResponse(File())  # type: ignore[arg-type]
    response.begin()
    return response
