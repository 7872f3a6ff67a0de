"""Connections to one HTTP server as they are opened, with their TLS handshakes: nothing waits."""

import os
import socket
import ssl
import time
from contextlib import suppress
from selectors import EVENT_READ, EVENT_WRITE
from typing import Any
from urllib.parse import urlsplit

KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 90_000}
"""A host that is gone is noticed after 90 s, however long the reply may take. Seconds, but
milliseconds for the last."""


class Server:
    """Where a server is, and when it last opened a connection or answered."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.host = parts.hostname or ""
        self._port = parts.port or (443 if self.tls else 80)
        self._addresses: list[Any] | OSError | None = None
        self.heard_at = -float("inf")

    def addresses(self) -> list[Any]:
        """What ``getaddrinfo`` finds; the name is looked up once.

        Raises:
            OSError: it finds nothing.
        """
        if self._addresses is None:
            try:
                self._addresses = socket.getaddrinfo(self.host, self._port, type=socket.SOCK_STREAM)
            except OSError as fault:
                self._addresses = fault
        if isinstance(self._addresses, OSError):
            raise self._addresses
        return list(self._addresses)

    def heard(self) -> None:
        """Something came from it."""
        self.heard_at = time.monotonic()

    def keep(self, address: Any) -> None:
        """A connection to this address is open; the others are not tried any more."""
        self._addresses = [address]
        self.heard()


class Opening:
    """A connection that is being opened, to one of the server's addresses after another.

    Raises:
        OSError: none can be reached, or the host is not known.
    """

    def __init__(self, server: Server) -> None:
        self._server, self._left = server, server.addresses()
        self.sock: socket.socket
        self._is_connected: bool
        self._begin()

    def advance(self) -> bool:
        """Go on, after the selector reported ``events``; whether ``sock`` is open.

        Raises:
            OSError: no address can be reached.
        """
        tls = self._server.tls
        try:
            if not self._is_connected:
                if code := self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise OSError(code, os.strerror(code))
                self._is_connected = True
                if tls is not None:
                    self.sock = tls.wrap_socket(
                        self.sock, server_hostname=self._server.host, do_handshake_on_connect=False
                    )
            if isinstance(self.sock, ssl.SSLSocket):
                self.sock.do_handshake()
        except ssl.SSLWantReadError:
            self.events = EVENT_READ
        except ssl.SSLWantWriteError:
            self.events = EVENT_WRITE
        except OSError as fault:
            self.give_up(fault)
        else:
            self._server.keep(self._address)
            return True
        return False

    def give_up(self, fault: OSError) -> None:
        """Go on with the next address.

        Raises:
            OSError: ``fault``, if there is none, or none can be reached.
        """
        self.sock.close()
        if not self._left:
            raise fault
        self._begin()

    def _begin(self) -> None:
        while True:
            self._address = self._left.pop(0)
            try:
                self.sock = _connecting(*self._address)
                break
            except OSError:
                if not self._left:
                    raise
        self.events, self._is_connected = EVENT_WRITE, False
        self.began = time.monotonic()


def _connecting(family: int, kind: int, protocol: int, _name: str, address: Any) -> socket.socket:
    """A socket that has begun to connect.

    Raises:
        OSError: it failed at once.
    """
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        with suppress(BlockingIOError):  # it goes on
            sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock
