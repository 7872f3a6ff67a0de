"""POST requests to one HTTP server, all at once, each on a connection of its own.

One thread opens some connections at a time and sends each request as its connection opens, so that
the server can batch them. Nothing but the look-up of its name waits: requests and replies pass in
parts, as each connection takes or has them, so one that stalls delays no other. No connection is
used twice: servers close idle ones (SGLang after 5 s), and a request that crosses the close is
lost.
"""

import http.client
import json
import resource
import selectors
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainer_bridge.http_exchange import Answer, Exchange, Fault, post
from trainer_bridge.http_opening import Opening, Server

CONNECT_TIMEOUT_S = 60.0
"""For one connection with its TLS handshake. It is then tried again, since nothing was sent, as
long as another one is open, or was opened or answered meanwhile: the server is there, but busy."""
OPENING_AT_ONCE = 128
"""Connections; fewer than any server holds until it accepts them (SGLang 2048)."""
MAX_CONNECTIONS = 16384
"""More than any engine runs requests, and fewer than the ports that a client has for one server."""
SPARE_DESCRIPTORS = 256
"""File descriptors left to the rest of the process."""
LONGEST_WAIT_S = 3600.0
"""Of one look at all connections; a selector takes no more than some days."""


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
    with selectors.DefaultSelector() as selector:
        batch = _Batch(url, messages, headers, timeout, selector)
        try:
            while batch.is_under_way():
                yield from batch.open_some()
                yield from batch.advance()
                yield from batch.end_late()
        finally:
            for key in selector.get_map().values():
                key.data[1].sock.close()


class _Batch:
    """The requests to one server: which wait, and which connections are opening or open."""

    def __init__(
        self,
        url: str,
        messages: Sequence[Any],
        headers: Mapping[str, str],
        timeout: float | None,
        selector: selectors.BaseSelector,
    ) -> None:
        parts = urlsplit(url)
        self._server, self._path, self._messages = Server(url), parts.path or "/", messages
        self._headers = {
            "Host": parts.netloc,
            "Content-Type": "application/json",
            "Connection": "close",
            **headers,
        }
        self._timeout = timeout
        self._deadline = float("inf") if timeout is None else time.monotonic() + timeout
        self._selector, self._room = selector, _allowed_sockets(len(messages))
        self._waiting = deque(range(len(messages)))
        self._openings: dict[int, Opening] = {}

    def is_under_way(self) -> bool:
        return bool(self._waiting or self._selector.get_map())

    def open_some(self) -> Iterator[tuple[int, Fault]]:
        """Begin to open connections, as many as may be; yields faults."""
        while (
            self._waiting
            and len(self._openings) < OPENING_AT_ONCE
            and len(self._selector.get_map()) < self._room
        ):
            index = self._waiting.popleft()
            try:
                opening = Opening(self._server)
            except OSError as fault:
                yield index, fault
                continue
            self._openings[index] = opening
            self._register(index, opening)

    def advance(self) -> Iterator[tuple[int, Answer | Fault]]:
        """Wait until connections open, or take or have something; yields how exchanges ended."""
        if not self._selector.get_map():  # none could be opened
            return
        ends = [self._deadline, *(o.began + CONNECT_TIMEOUT_S for o in self._openings.values())]
        left = min(min(ends) - time.monotonic(), LONGEST_WAIT_S)
        for key, _ in self._selector.select(max(left, 0.0)):
            index, part = key.data
            if isinstance(part, Opening):
                yield from self._open(index, part)
                continue
            answer = part.advance()
            if isinstance(answer, tuple):
                self._server.heard()
            if answer is not None:
                self._selector.unregister(part.sock)
                part.sock.close()
                yield index, answer
            elif part.events != key.events:
                self._selector.modify(part.sock, part.events, key.data)

    def end_late(self) -> Iterator[tuple[int, Fault]]:
        """Give up connections that take too long to open, and all at the deadline."""
        now = time.monotonic()
        if now >= self._deadline:
            fault = TimeoutError(f"no answer within {self._timeout:g} s")
            for key in list(self._selector.get_map().values()):
                self._selector.unregister(key.fileobj)
                key.data[1].sock.close()
                yield key.data[0], fault
            yield from self._drop_waiting(fault)
            return
        late = [i for i, o in self._openings.items() if now >= o.began + CONNECT_TIMEOUT_S]
        for index in late:
            opening = self._openings[index]
            began = opening.began
            self._selector.unregister(opening.sock)
            try:
                opening.give_up(TimeoutError(f"no connection within {CONNECT_TIMEOUT_S:g} s"))
                self._register(index, opening)
            except OSError as fault:
                del self._openings[index]
                is_there = len(self._selector.get_map()) > len(self._openings)
                if is_there or self._server.heard_at > began:
                    self._waiting.append(index)
                else:
                    yield index, fault
                    yield from self._drop_waiting(fault)

    def _open(self, index: int, opening: Opening) -> Iterator[tuple[int, Fault]]:
        """Go on with a connection, and begin to send once it is open."""
        self._selector.unregister(opening.sock)
        part: Opening | Exchange = opening
        try:
            if opening.advance():
                del self._openings[index]
                body = json.dumps(self._messages[index]).encode()
                part = Exchange(opening.sock, post(self._path, body, self._headers))
        except (OSError, http.client.HTTPException) as fault:
            self._openings.pop(index, None)
            opening.sock.close()
            yield index, fault
        else:
            self._register(index, part)

    def _drop_waiting(self, fault: Fault) -> Iterator[tuple[int, Fault]]:
        while self._waiting:
            yield self._waiting.popleft(), fault

    def _register(self, index: int, part: Opening | Exchange) -> None:
        self._selector.register(part.sock, part.events, (index, part))


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
