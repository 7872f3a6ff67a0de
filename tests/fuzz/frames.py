"""Frames on a socket; and the manifest that is in one, and how it is cut into chunks."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sgl_fp8rl.protocol import framing
from sgl_fp8rl.protocol.chunks import cut_into_chunks
from sgl_fp8rl.protocol.manifest import PROTOCOL, Manifest, ManifestError
from tests.fuzz.decoder import Decoder, parse, to_frames

TIMEOUT_S = 10.0
MOST_CHUNKS = 1000
"""An engine cuts only what matches its model; here others are cut too, up to this many."""
MANIFEST: dict[str, Any] = {
    "protocol": PROTOCOL,
    "tensors": {
        "w": ["float8_e4m3fn", [256, 128]],
        "w_scale_inv": ["float32", [2, 1]],
        "experts": ["bfloat16", [2, 64, 32]],
        "norm": ["float16", [64]],
        "scalar": ["float32", []],
    },
    "chunk_bytes": 32768,
    "mapped": ["norm"],
    "streamed": False,
    "slots": 2,
    "codes": "block-fp8",
}


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


def decode_manifest(data: bytes) -> None:
    manifest = Manifest.from_json(parse(data))
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest and again.fingerprint == manifest.fingerprint
    if manifest.nbytes < MOST_CHUNKS * manifest.chunk_bytes:
        rows = [piece.rows for chunk in cut_into_chunks(manifest) for piece in chunk]
        assert all(start < stop for start, stop in rows)


@contextmanager
def decoders() -> Iterator[list[Decoder]]:
    seeds = ([{"op": "chunk", "index": 1}, {"op": "finish"}], [{"ok": True, "known": ["a"]}], [{}])
    unmapped = {**MANIFEST, "mapped": []}
    small = {**unmapped, "tensors": {"n": ["bfloat16", [4096]]}}
    manifests = MANIFEST, {**unmapped, "streamed": True, "slots": 1}, small
    refused = framing.FramingError, ManifestError
    yield [
        Decoder("frames", seeds, decode, (framing.FramingError,), to_frames),
        Decoder("manifest", manifests, decode_manifest, refused),
    ]
