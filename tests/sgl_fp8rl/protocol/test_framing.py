"""Messages on a socket: what is framed, what is refused, and that no descriptor is left."""

import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_fp8rl.protocol import framing

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with a, b:
        a.settimeout(10)
        b.settimeout(10)
        yield a, b


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.integers())))
def test_a_message_arrives_as_it_was_sent(message: dict[str, Any]) -> None:
    a, b = socket.socketpair()
    with a, b:
        framing.send(a, message)
        framing.send(a, {"next": 1})
        assert framing.receive(b) == (message, [])
        assert framing.receive(b) == ({"next": 1}, [])


def test_a_message_larger_than_any_buffer(pair: Pair) -> None:
    message = {"names": ["x" * 100] * 50_000}
    sender = threading.Thread(target=framing.send, args=(pair[0], message))
    sender.start()
    assert framing.receive(pair[1])[0] == message
    assert pair[1].gettimeout() == 10, "it stays as it was"
    sender.join(10)


def test_descriptors_travel_with_their_message(pair: Pair) -> None:
    with (Path("/proc/self/stat")).open() as one:
        framing.send(pair[0], {"op": "bucket"}, (one.fileno(), one.fileno()))
        message, fds = framing.receive(pair[1])
        assert message == {"op": "bucket"}
        assert len(fds) == 2
        assert {os.fstat(fd).st_ino for fd in fds} == {os.fstat(one.fileno()).st_ino}
    for fd in fds:
        os.close(fd)


def framed(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


def send_with_descriptor(sock: socket.socket, data: bytes) -> None:
    if data:
        with Path("/proc/self/stat").open() as carried:
            socket.send_fds(sock, [data], [carried.fileno()])


BAD = {
    "nothing": b"",
    "half a length": b"\0\0",
    "half a body": struct.pack("!I", 100) + b"{}",
    "a huge length": struct.pack("!I", framing.MAX_MESSAGE_BYTES + 1),
    "no JSON": framed(b"hello"),
    "no text": framed(b"\xff\xfe"),
    "a list": framed(b"[1]"),
    "null": framed(b"null"),
    "an empty body": framed(b""),
    "nested without end": framed(b"[" * 100_000),
}


@pytest.mark.guarantee("malformed", fault="frames that are not messages")
@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_what_is_no_message_is_refused(pair: Pair, data: bytes) -> None:
    before = descriptors()
    send_with_descriptor(pair[0], data)
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(
        framing.FramingError, match=r"the connection ended|the peer is not a bridge"
    ):
        framing.receive(pair[1])
    assert descriptors() == before


def test_silence_is_a_timeout_and_keeps_no_descriptor(
    pair: Pair,
) -> None:
    before = descriptors()
    send_with_descriptor(pair[0], b"\0\0\0\5")
    pair[1].settimeout(0.05)
    with pytest.raises(TimeoutError):
        framing.receive(pair[1])
    assert descriptors() == before


def test_the_peer_is_known_by_its_user(pair: Pair) -> None:
    assert framing.peer_uid(pair[0]) == os.getuid()


def test_a_message_that_trickles_in_is_given_up(pair: Pair) -> None:
    """Though no byte of it is waited for as long as the socket's timeout."""
    received = threading.Event()

    def trickle() -> None:
        pair[0].sendall(struct.pack("!I", 100))
        for _ in range(100):
            if received.wait(0.05):
                return
            pair[0].sendall(b" ")

    pair[1].settimeout(0.5)
    sender = threading.Thread(target=trickle)
    sender.start()
    try:
        with pytest.raises(TimeoutError):
            framing.receive(pair[1])
    finally:
        received.set()
        sender.join(10)
    framing.send(pair[1], {"other": "way"})
    assert framing.receive(pair[0])[0] == {"other": "way"}


def test_bytes_that_keep_coming_do_not_put_off_the_end(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are there at once; the clock says that the time ran out."""
    times = iter([0.0, 1.0, 11.0])
    monkeypatch.setattr(framing, "time", SimpleNamespace(monotonic=lambda: next(times)))
    pair[0].sendall(struct.pack("!I", 2 << 20) + b" " * 4096)  # in two pieces
    pair[0].sendall(b" " * 4096)
    with pytest.raises(TimeoutError, match="did not end"):
        framing.receive(pair[1])
