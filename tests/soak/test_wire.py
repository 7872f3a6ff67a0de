"""Something happens at the byte that was named, and all bytes are sent as without it."""

import socket

import pytest

from sgl_fp8rl.protocol import framing
from tests.soak.wire import Wire

MESSAGES = [{"token": "a"}, {"op": "chunk", "index": 0}, {"op": "commit"}]


@pytest.mark.parametrize("at", [0, 1, 20, 49])
def test_acts_at_one_byte(at: int) -> None:
    here, there = socket.socketpair()
    seen: list[tuple[int, int]] = []

    def act(wire: Wire, peer: socket.socket) -> None:
        assert peer is here
        there.setblocking(False)
        try:
            seen.append((len(there.recv(1000, socket.MSG_PEEK)), wire.chunks))
        except BlockingIOError:
            seen.append((0, wire.chunks))
        there.setblocking(True)

    with here, there:
        with Wire(at, act).tapped() as wire:
            for message in MESSAGES:
                framing.send(here, message)
        assert [framing.receive(there)[0] for _ in MESSAGES] == MESSAGES
    assert at < wire.sent
    assert seen == [(at, int(at == 49))]
    assert wire.chunks == 1
