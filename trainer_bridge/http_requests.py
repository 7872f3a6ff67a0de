"""POST requests to one HTTP server, all at once, each on a connection of its own.

One thread sends every request before it reads a reply, so that the server can batch them. Only
opening a connection waits, at most CONNECT_TIMEOUT_S: requests and replies pass in parts, as each
connection takes or has them, so one that stalls delays no other. No connection is used twice:
servers close idle ones (SGLang after 5 s), and a request that crosses the close is lost.
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

from trainer_bridge.http_exchange import Answer, Exchange, Fault, post

CONNECT_TIMEOUT_S = 60.0
"""For one connection with its TLS handshake; where none comes of it, no other is tried."""
MAX_CONNECTIONS = 16384
"""More than any engine runs requests, and fewer than the ports that a client has for one server."""
SPARE_DESCRIPTORS = 256
"""File descriptors left to the rest of the process."""
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 90_000}
"""A host that is gone is noticed after 90 s, however long the reply may take. Seconds, but
milliseconds for the last."""


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
                        exchange = server.send(json.dumps(message).encode())
                    except (OSError, http.client.HTTPException) as fault:
                        yield index, fault
                        continue
                    selector.register(exchange.sock, exchange.events, (index, exchange))
                    if len(selector.get_map()) == room:
                        break
                if not selector.get_map():
                    return
                left = server.seconds_left()
                ready = [key for key, _ in selector.select(left)]
                # at the deadline each has its last turn
                for key in ready if left != 0.0 else list(selector.get_map().values()):
                    index, exchange = key.data
                    answer = exchange.advance()
                    if answer is None and left == 0.0:
                        answer = server.too_late()
                    if answer is not None:
                        selector.unregister(exchange.sock)
                        exchange.sock.close()
                        yield index, answer
                    elif exchange.events != key.events:
                        selector.modify(exchange.sock, exchange.events, key.data)
        finally:
            for key in selector.get_map().values():
                key.data[1].sock.close()


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

    def send(self, body: bytes) -> Exchange:
        """Begin to send one request on a new connection.

        Raises:
            OSError: it cannot be sent; once the host was silent, that is not tried again.
        """
        if self._silence is not None:
            raise self._silence
        request = post(self._path, body, self._headers)
        try:
            sock = self._open()
        except TimeoutError as fault:
            self._silence = fault
            raise
        try:
            return Exchange(sock, request)
        except BaseException:
            sock.close()
            raise

    def seconds_left(self) -> float | None:
        """Until the deadline; None where there is none."""
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def too_late(self) -> TimeoutError:
        """The fault of a request that has no answer at the deadline."""
        return TimeoutError(f"no answer within {self._timeout:g} s")

    def _open(self) -> socket.socket:
        left = self.seconds_left()
        if left == 0.0:
            raise self.too_late()
        limit = CONNECT_TIMEOUT_S if left is None else min(left, CONNECT_TIMEOUT_S)
        began = time.monotonic()
        sock = socket.create_connection(self._peer, limit)
        try:
            # for the TLS handshake, as a whole; 0 would not wait at all
            sock.settimeout(max(limit - (time.monotonic() - began), 1e-3))
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
