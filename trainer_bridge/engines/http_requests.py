"""POST requests to one HTTP server, all at once, each on a connection of its own.

aiohttp sends them from a thread of their own, whatever runs in the caller's. No connection is used
twice, since servers close idle ones (SGLang after 5 s) and a request that crosses the close is
lost; so a request is never sent again.
"""

import asyncio
import io
import json
import resource
import socket
import ssl
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import aiohttp
from yarl import URL

CONNECT_TIMEOUT_S = 60.0
"""For one connection with its TLS handshake. It is then tried again, since nothing was sent, as
long as another one is open, or was opened or answered meanwhile: the server is there, but busy."""
OPENING_AT_ONCE = 128
"""Connections; fewer than any server holds until it accepts them (SGLang 2048)."""
MAX_CONNECTIONS = 16384
"""More than any engine runs requests, and fewer than the ports that a client has for one server."""
SPARE_DESCRIPTORS = 256
"""File descriptors left to the rest of the process."""
LONGEST_REPLY = 1 << 32
"""Bytes of a reply: more than a response of a million tokens of Qwen3-235B-A22B has, each with its
logprob and policy (about 80 bytes) and 8 experts of each of 94 layers (4011 bytes)."""
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6, "TCP_USER_TIMEOUT": 90_000}
"""A host that is gone is noticed after 90 s, however long the reply may take. Seconds, but
milliseconds for the last."""

T = TypeVar("T")
Answer = tuple[int, bytes]
"""HTTP status and body."""
Fault = OSError | aiohttp.ClientError | asyncio.TimeoutError
"""What kept an answer from coming."""


class ReplyTooLongError(aiohttp.ClientError):
    """A reply has more than LONGEST_REPLY bytes, or announces them."""

    def __init__(self) -> None:
        super().__init__(f"a reply of more than {LONGEST_REPLY} bytes")


def post_all(
    url: str,
    messages: Sequence[Any],
    headers: Mapping[str, str],
    read: Callable[[Answer | Fault], T],
    timeout: float | None = None,
) -> list[T]:
    """POST each message as JSON, and return what ``read`` makes of the answers, in their order.

    Where it is interrupted it closes the connections, and SGLang then aborts the requests. Proxies
    of the environment are not used, and redirects are not followed.

    Args:
        timeout: seconds for all of them; None waits as long as the server's host is there.

    Warns:
        RuntimeWarning: the process may not open a socket for each message, so the last are sent
            when the first have their answers.
    """
    if not messages:
        return []
    batch = _Batch(url, headers, read, timeout, _allowed_sockets(len(messages)))
    loop = asyncio.SelectorEventLoop()
    task = loop.create_task(batch.post(messages))
    # not of a pool, which takes no work any more once the interpreter ends
    thread = Thread(target=_run, args=(loop, task), name="fp8rl-http", daemon=True)
    try:
        thread.start()  # waits until it runs, and may be interrupted there
        thread.join()
    except BaseException:
        with suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(task.cancel)
        raise
    finally:
        if thread.ident is not None:
            thread.join()
        batch.close()
    return task.result()


def _run(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[T]") -> None:
    try:
        loop.run_until_complete(asyncio.wait([task]))
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


class _Batch(Generic[T]):
    """The requests to one server."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        read: Callable[[Answer | Fault], T],
        timeout: float | None,
        room: int,
    ) -> None:
        self._url, self._read = URL(url, encoded=True), read
        self._timeout, self._room = timeout, room
        self._headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            "Connection": "close",
            **headers,
        }
        self._opening = asyncio.Semaphore(OPENING_AT_ONCE)
        self._open, self._last_activity = 0, -float("inf")
        """Connections, and when one was opened last or brought an answer."""
        self._gone: Fault | None = None
        """Why nothing more is sent."""
        self._sockets = weakref.WeakSet[socket.socket]()

    async def post(self, messages: Sequence[Any]) -> list[T]:
        """All of them."""
        traces = aiohttp.TraceConfig()
        traces.on_connection_create_end.append(self._opened)
        connector = aiohttp.TCPConnector(
            limit=self._room,
            force_close=True,
            resolver=aiohttp.ThreadedResolver(),
            socket_factory=self._socket,
            ssl=ssl.create_default_context() if self._url.scheme == "https" else True,
        )
        async with aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S),
            trace_configs=[traces],
            auto_decompress=False,
        ) as session:
            tasks = [asyncio.create_task(self._answered(session, each)) for each in messages]
            try:
                _, late = await asyncio.wait(tasks, timeout=self._timeout)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        too_late = TimeoutError(f"no answer within {self._timeout or 0:g} s")
        return [self._read(too_late) if task in late else task.result() for task in tasks]

    def close(self) -> None:
        """Close what is open: a transport waits until what it has left to send is sent."""
        for sock in self._sockets:
            sock.close()

    async def _answered(self, session: aiohttp.ClientSession, message: Any) -> T:
        return self._read(await self._ask(session, message))

    async def _ask(self, session: aiohttp.ClientSession, message: Any) -> Answer | Fault:
        while True:
            await self._opening.acquire()
            turn, began = SimpleNamespace(is_open=False), time.monotonic()
            try:
                if self._gone is not None:
                    return self._gone
                async with session.post(
                    self._url,
                    data=io.BytesIO(json.dumps(message).encode()),
                    headers=self._headers,
                    allow_redirects=False,
                    trace_request_ctx=turn,
                ) as response:
                    answer = response.status, await _body(response)
                    self._last_activity = time.monotonic()
                    return answer
            except aiohttp.ConnectionTimeoutError:
                if not self._open and self._last_activity <= began:
                    self._gone = TimeoutError(f"no connection within {CONNECT_TIMEOUT_S:g} s")
                    return self._gone
            except aiohttp.ClientConnectorCertificateError as fault:
                return fault.certificate_error  # type: ignore[return-value]
            except aiohttp.ClientConnectorError as fault:
                return fault.os_error
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as fault:
                return fault
            finally:
                if turn.is_open:
                    self._open -= 1
                else:
                    self._opening.release()

    async def _opened(self, session: Any, context: SimpleNamespace, params: Any) -> None:
        """A request has its connection; the next one may open another."""
        context.trace_request_ctx.is_open = True
        self._open += 1
        self._last_activity = time.monotonic()
        self._opening.release()

    def _socket(self, address: Any) -> socket.socket:
        family, kind, protocol, *_ = address
        sock = socket.socket(family, kind, protocol)
        self._sockets.add(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        return sock


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """What a reply holds.

    Raises:
        ReplyTooLongError: more than that.
    """
    received = bytearray()
    if (response.content_length or 0) > LONGEST_REPLY:
        raise ReplyTooLongError
    async for part in response.content.iter_any():
        received += part
        if len(received) > LONGEST_REPLY:
            raise ReplyTooLongError
    return bytes(received)


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
