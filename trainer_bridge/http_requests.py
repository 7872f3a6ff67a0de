"""POST requests to one HTTP server, all at once, each on a connection of its own.

One thread sends every request before it reads a reply, so that the server can batch them; the
kernel then reports which connections have theirs. No connection is used twice: servers close idle
ones (SGLang after 5 s), and a request that crosses the close is lost.
"""

import http.client
import json
import resource
import selectors
import socket
import ssl
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 60.0
MAX_CONNECTIONS = 16384
"""More than any engine runs requests, and fewer than the ports that a client has for one server."""
SPARE_DESCRIPTORS = 256
"""File descriptors left to the rest of the process."""
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 90_000}
"""A host that is gone is noticed after 90 s, however long the reply may take. Seconds, but
milliseconds for the last."""

Answer = tuple[int, bytes]
"""HTTP status and body."""
Fault = OSError | http.client.HTTPException
"""What kept an answer from coming."""


def post_all(
    url: str,
    messages: Sequence[Any],
    headers: Mapping[str, str],
    timeout: float | None = None,
) -> Iterator[tuple[int, Answer | Fault]]:
    """POST each message as JSON, and yield its index and answer when that comes.

    Closing the iterator closes the connections, and SGLang then aborts the requests.

    Args:
        timeout: seconds for all of them; None waits as long as the server's host is there.

    Warns:
        RuntimeWarning: the process may not open a socket for each message, so the last are sent
            when the first have their answers.
    """
    server = _Server(url, headers, timeout)
    room = _allowed_sockets(len(messages))
    waiting = enumerate(messages)
    with selectors.DefaultSelector() as selector:
        try:
            while True:
                for index, message in waiting:
                    try:
                        connection = server.send(json.dumps(message).encode())
                    except (OSError, http.client.HTTPException) as fault:
                        yield index, fault
                        continue
                    selector.register(connection.sock, selectors.EVENT_READ, (index, connection))
                    if len(selector.get_map()) == room:
                        break
                if not selector.get_map():
                    return
                # past the deadline none is ready, and each reads that it is too late
                ready = selector.select(server.seconds_left())
                for key in [key for key, _ in ready] or list(selector.get_map().values()):
                    selector.unregister(key.fileobj)
                    index, connection = key.data
                    yield index, server.receive(connection)
        finally:
            for key in selector.get_map().values():
                key.data[1].close()


class _Server:
    """Opens connections to one server, until a deadline."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout: float | None) -> None:
        parts = urlsplit(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname or ""
        self._peer = (self._host, parts.port or (443 if self._tls else 80))
        self._path = parts.path or "/"
        self._headers = {
            "Host": parts.netloc,
            "Content-Type": "application/json",
            "Connection": "close",
            **headers,
        }
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._silence: TimeoutError | None = None

    def send(self, body: bytes) -> http.client.HTTPConnection:
        """Send one request on a new connection.

        Raises:
            OSError: it cannot be sent; once the host was silent, that is not tried again.
        """
        if self._silence is not None:
            raise self._silence
        connection = http.client.HTTPConnection(self._host)
        try:
            connection.sock = self._open()
            connection.request("POST", self._path, body, self._headers)
        except BaseException as fault:
            connection.close()
            if isinstance(fault, TimeoutError):
                self._silence = fault
            raise
        return connection

    def receive(self, connection: http.client.HTTPConnection) -> Answer | Fault:
        """Read a reply that has begun, or say that it came too late."""
        try:
            connection.sock.settimeout(self._remaining())
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as fault:
            return fault
        finally:
            connection.close()

    def seconds_left(self) -> float | None:
        """Until the deadline; None where there is none."""
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def _remaining(self) -> float | None:
        left = self.seconds_left()
        if left == 0.0:
            raise TimeoutError(f"no answer within {self._timeout:g} s")
        return left

    def _open(self) -> socket.socket:
        left = self._remaining()
        sock = socket.create_connection(
            self._peer, CONNECT_TIMEOUT_S if left is None else min(left, CONNECT_TIMEOUT_S)
        )
        try:
            self._peer = sock.getpeername()[:2]  # the name is looked up once
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            if self._tls is not None:
                return self._tls.wrap_socket(sock, server_hostname=self._host)
        except BaseException:
            sock.close()
            raise
        return sock


def _allowed_sockets(wanted: int) -> int:
    """How many of these sockets may be open at once; raises the soft limit where that helps."""
    wanted = min(wanted, MAX_CONNECTIONS)
    used = len(list(Path("/dev/fd").iterdir())) + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < used + wanted:
        soft = used + wanted if hard == resource.RLIM_INFINITY else min(used + wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < used + wanted:
            allowed = max(soft - used, 1)
            warnings.warn(
                f"{wanted} requests, but the limit of {hard} file descriptors allows only "
                f"{allowed} at once; raise it (ulimit -Hn), or the engine may run too few",
                RuntimeWarning,
                stacklevel=2,
            )
            return allowed
    return wanted
