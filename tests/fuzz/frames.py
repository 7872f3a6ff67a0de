"""Frames on a socket."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sgl_fp8rl.protocol import framing
from tests.fuzz.decoder import Decoder, to_frames

TIMEOUT_S = 10.0


@contextmanager
def arrived(data: bytes, fds: tuple[int, ...] = ()) -> Iterator[socket.socket]:
    """A socket whose peer sent these bytes and hung up."""
    peer, sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with peer, sock:
        sock.settimeout(TIMEOUT_S)
        peer.settimeout(TIMEOUT_S)
        if fds and data:
            data = data[socket.send_fds(peer, [data], list(fds)) :]
        peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
        yield sock


def decode(data: bytes) -> None:
    carried = os.open("/dev/null", os.O_RDONLY)
    try:
        with arrived(data, (carried,)) as sock:
            before = open_descriptors()
            while sock.recv(1, socket.MSG_PEEK):
                try:
                    message, fds = framing.receive(sock)
                except framing.FramingError:
                    assert open_descriptors() == before
                    raise
                assert isinstance(message, dict)
                for fd in fds:
                    os.close(fd)
    finally:
        os.close(carried)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def decoders() -> Iterator[list[Decoder]]:
    seeds = ([{"op": "chunk", "index": 1}, {"op": "finish"}], [{"ok": True, "known": ["a"]}], [{}])
    yield [Decoder("frames", seeds, decode, (framing.FramingError,), to_frames)]
