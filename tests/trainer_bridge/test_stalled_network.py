"""A network that stalls on the way to a remote engine, while another one is local.

Nothing is closed: what was sent is not delivered, and no packet says so. A proxy between trainer
and relay forwards so many bytes, and no more.
"""

import math
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge.calls import before
from tests.trainer_bridge.served import left
from tests.trainer_bridge.test_remote_engine import SMALL, SNAPSHOT_BYTES, remote_engine, step
from tests.trainer_bridge.test_transaction import serves, states
from tests.trainer_bridge.test_update import engine_of
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.session import participant
from trainer_bridge.transport.relay_client import RelayClient
from trainer_bridge.updates.update import update

pytestmark = pytest.mark.timeout(120)

STEP_S = 6.0
"""In the place of the 120 s that one engine of several may take over a step."""
SILENCE_S = 3.0
"""``--fp8rl-session-timeout-s`` of the remote engine."""
IN_A_CHUNK = SMALL // 2 + 4096
"""Bytes: in the second chunk, of which more is left than ``NARROW`` sockets hold."""
IN_THE_CHANGES = 1500
"""Bytes: behind the first changes of an update, and before the last one."""
NARROW, WIDE = 8 << 10, 128 << 10
"""Bytes that a socket on the way holds; the kernel doubles them."""
POLL_S = 0.01


class Network:
    """Forwards one connection after the other, each to the port of its session."""

    def __init__(self) -> None:
        self.to_engine: float = math.inf
        """How many more bytes reach the engine; nothing reaches the trainer after them."""
        self.to_trainer: float = math.inf
        self.is_over = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def carry(self, port: int) -> None:
        """Carry the next connection to here on to ``port``."""
        threading.Thread(target=self._carry, args=(port,), daemon=True).start()

    def narrow(self) -> None:
        """From the next connection on have little room for what is on its way."""
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NARROW)

    def recover(self) -> None:
        """What was sent arrives now."""
        self.to_engine = self.to_trainer = math.inf
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WIDE)

    def close(self) -> None:
        self.is_over = True
        self._listener.close()

    def _carry(self, port: int) -> None:
        with suppress(OSError):  # either end is gone, or the test is over
            trainer, _ = self._listener.accept()
            with trainer, socket.create_connection(("127.0.0.1", port)) as engine:
                ways = {trainer: (engine, "to_engine"), engine: (trainer, "to_trainer")}
                while not self.is_over and ways:
                    for end in select.select([*ways], [], [], POLL_S)[0]:
                        other, way = ways[end]
                        room = getattr(self, way)
                        if not room:
                            time.sleep(POLL_S)
                            continue
                        data = end.recv(int(min(room, 1 << 16)))
                        setattr(self, way, room - len(data))
                        if not self.to_engine:
                            self.to_trainer = 0
                        if data:
                            other.sendall(data)
                        else:
                            other.shutdown(socket.SHUT_WR)
                            del ways[end]


class Behind(FakeEngine):
    """An engine on another host, behind a network that can stall."""

    network: Network

    def _begin(self, message: dict[str, Any]) -> dict[str, Any]:
        begun = super()._begin(message)
        if "relay" not in begun:
            return begun
        self.network.carry(begun["relay"]["port"])
        return {**begun, "relay": {"host": "127.0.0.1", "port": self.network.port}}


def narrow(connect: Callable[..., socket.socket]) -> Callable[..., socket.socket]:
    """With the least room for what is on its way."""

    def narrowed(*args: Any) -> socket.socket:
        connection = connect(*args)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, NARROW)
        return connection

    return narrowed


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    monkeypatch.setattr(participant, "STEP_TIMEOUT_S", STEP_S)
    network = Network()
    yield network
    network.close()


def engines_on(network: Network, snapshot_bytes: int = 0) -> tuple[FakeEngine, Behind]:
    """A local and a remote one, which serve version 0."""
    remote = Behind(remote_engine(2, SMALL, snapshot_bytes).ranks, SMALL, snapshot_bytes)
    remote.place, remote.network = remote_engine().place, network
    engines = engine_of(1, SMALL), remote
    update(toy.checkpoint(0), engines, version=0)
    assert [left(engine) for engine in engines] == ["0", "0"]
    remote.silence_s = SILENCE_S
    return engines


def in_a_chunk(patch: pytest.MonkeyPatch, network: Network) -> None:
    network.to_engine = IN_A_CHUNK


def in_a_chunk_with_full_buffers(patch: pytest.MonkeyPatch, network: Network) -> None:
    """The trainer cannot send on either."""
    network.to_engine = IN_A_CHUNK
    patch.setattr(socket, "create_connection", narrow(socket.create_connection))
    network.narrow()


def in_a_change(patch: pytest.MonkeyPatch, network: Network) -> None:
    """Nothing was written on the remote engine, but it cannot know whether the other commits: it is
    quarantined, unlike one that is updated alone."""
    network.to_engine = IN_THE_CHANGES


def at_the_commit(ways: tuple[str, ...], patch: pytest.MonkeyPatch, network: Network) -> None:
    """The commit, or the answer to it, is under way for ever. What was decided stays so: the next
    try at this version sends nothing."""

    def stall(_: RelayClient, message: dict[str, Any], *__: Any) -> None:
        if message["op"] == "commit":
            for way in ways:
                setattr(network, way, 0)

    before(patch, RelayClient, "send", stall)


STEP, DECIDED = f"engine 1: .*took longer than {STEP_S:.0f} s", r"committed on 1 of 2 .*engine 1"
BOTH, ONE = "quarantined quarantined", "1 quarantined"


@pytest.mark.guarantee("several-engines", fault="the network to one of two engines stalls")
@pytest.mark.guarantee("several-engines", fault="the network stalls after the vote")
@pytest.mark.guarantee("several-engines", fault="the network stalls in a change")
@pytest.mark.parametrize(
    ("where", "require", "why", "found"),
    [
        *(
            (where, require, STEP, found)
            for where in (in_a_chunk, in_a_chunk_with_full_buffers, in_a_change)
            for require, found in ((None, BOTH), (1, ONE))
        ),
        (partial(at_the_commit, ("to_trainer", "to_engine")), None, DECIDED, ONE),
        (partial(at_the_commit, ("to_trainer",)), None, DECIDED, "1 1"),
    ],
)
def test_it_stalls(where: Any, require: int | None, why: str, found: str, network: Network) -> None:
    """The local engine does not wait longer than a step may take, and is dealt with as ``require``
    says; the remote one has heard nothing and is quarantined."""
    is_change = where is in_a_change
    engines = engines_on(network, SNAPSHOT_BYTES if is_change else 0)
    tensors = step(toy.checkpoint(0), 1, part=0.01) if is_change else toy.checkpoint(1)
    with pytest.MonkeyPatch.context() as patch:
        where(patch, network)
        if require is None:
            with pytest.raises(EngineError, match=why):
                update(tensors, engines, version=1)
        else:
            result = update(tensors, engines, version=1, require=require)
            assert list(result.failed) == ["engine 1"]
            assert f"took longer than {STEP_S:.0f} s" in result.failed["engine 1"]
    engines[1].control({"op": "end"})
    served = ["1" if serves(each, 1, tensors) else states(each)[0].value for each in engines]
    assert " ".join(served) == found
    # the way back, once the network has recovered
    network.recover()
    engines[1].silence_s = 30.0
    again = update(
        toy.checkpoint(2) if is_change else tensors, engines, version=2 if is_change else 1
    )
    assert again.failed == {} and (again.bytes > 0) == (why is STEP)
    assert [left(engine) for engine in engines] == [f"{again.version}"] * 2
