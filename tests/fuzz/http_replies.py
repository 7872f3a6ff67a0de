"""The bytes of an HTTP reply, which come in parts: lengths, chunks, and neither."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from socket import socket
from typing import Any

import pytest

from tests.fuzz.decoder import Decoder, to_json
from tests.fuzz.frames import arrived
from trainer_bridge.engines import http_requests
from trainer_bridge.engines.engine_client import EngineError, HTTPEngine

LONGEST_REPLY = 10_000
"""Some inputs are longer."""
OK = "HTTP/1.1 200 OK\r\n"
LENGTH = ["HTTP/1.1 ", 200, " OK", "\r\n", "Content-Length: ", 12, "\r\n\r\n", '{"ok": true}']
CHUNKS = [
    *(OK, "Transfer-Encoding: ", "chunked", "\r\n\r\n"),
    *(5, ";a=b", "\r\n", '{"ok"', "\r\n", 7, "\r\n", ": true}", "\r\n"),
    *(0, "\r\n", "Digest: x", "\r\n", "\r\n"),
]
SEEDS = (
    LENGTH,
    CHUNKS,
    ["HTTP/1.1 100 Continue", "\r\n\r\n", *["HTTP/1.1 100 x\n\n"] * 30, *LENGTH],
    ["HTTP/1.0 200 OK", "\r\n", "Connection: close\r\n", "\r\n", '{"ok": true}'],
    ["HTTP/1.1 ", 503, " Unavailable\r\n\r\n", '{"error": "the engine is quarantined"}'],
)


def to_http(value: Any) -> bytes:
    """The pieces of a reply, one after the other."""
    pieces = value if isinstance(value, list) else [value]
    return b"".join(
        piece.encode("latin-1", "replace") if isinstance(piece, str) else to_json(piece)
        for piece in pieces
    )


def decode(connections: list[socket], data: bytes) -> None:
    with arrived(data) as sock:
        connections.append(sock)
        try:
            reply = HTTPEngine("http://127.0.0.1", None).control({"op": "status"})
            assert isinstance(reply, dict)
        finally:
            assert not connections and sock.fileno() < 0, "the connection stays open"


@contextmanager
def decoders() -> Iterator[list[Decoder]]:
    connections: list[socket] = []

    async def connected(**_: Any) -> socket:
        connections[-1].setblocking(False)
        return connections.pop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_requests, "LONGEST_REPLY", LONGEST_REPLY)
        patch.setattr("aiohttp.connector.aiohappyeyeballs.start_connection", connected)
        read = partial(decode, connections)
        yield [Decoder("HTTP bytes", SEEDS, read, (EngineError,), to_http, relays=True)]
