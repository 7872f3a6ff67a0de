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
from typing import Any

import pytest

from sgl_fp8rl.protocol.states import State
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge.served import left
from tests.trainer_bridge.test_far_engine import IMAGE_BYTES, SMALL, remote_engine, step
from tests.trainer_bridge.test_transaction import states
from tests.trainer_bridge.test_update import engine_of, holds
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.session import participant
from trainer_bridge.transport.relay_client import RelayClient
from trainer_bridge.updates.update import UpdateResult, update

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


def engines_on(network: Network, image_bytes: int = 0) -> tuple[FakeEngine, Behind]:
    """A local and a remote one, which serve version 0."""
    remote = Behind(remote_engine(2, SMALL, image_bytes).ranks, SMALL, image_bytes)
    remote.place, remote.network = remote_engine().place, network
    engines = engine_of(1, SMALL), remote
    update(toy.checkpoint(0), engines, version=0)
    assert [left(engine) for engine in engines] == ["0", "0"]
    remote.silence_s = SILENCE_S
    return engines


def heal(engines: tuple[FakeEngine, Behind], version: int) -> UpdateResult:
    """The way back, once the network has recovered."""
    engines[1].network.recover()
    engines[1].silence_s = 30.0
    result = update(toy.checkpoint(version), engines, version=version)
    assert result.failed == {}
    assert [left(engine) for engine in engines] == [f"{version}"] * 2
    return result


@pytest.mark.guarantee("several-engines", fault="the network to one of two engines stalls")
@pytest.mark.parametrize("require", [None, 1])
@pytest.mark.parametrize("blocks", [False, True])
def test_it_stalls_in_a_chunk(
    require: int | None, blocks: bool, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local one does not wait longer than a step may take, and is dealt with as ``require``
    says; the remote one has heard nothing and is quarantined.

    Args:
        blocks: the trainer cannot send on either, since all buffers on the way are full.
    """
    engines, why = engines_on(network), f"took longer than {STEP_S:.0f} s"
    network.to_engine = IN_A_CHUNK
    with monkeypatch.context() as patch:
        if blocks:
            patch.setattr(socket, "create_connection", narrow(socket.create_connection))
            network.narrow()
        if require is None:
            with pytest.raises(EngineError, match=f"engine 1: .*{why}"):
                update(toy.checkpoint(1), engines, version=1)
        else:
            result = update(toy.checkpoint(1), engines, version=1, require=require)
            assert why in result.failed["engine 1"]
    engines[1].control({"op": "end"})
    local = "quarantined" if require is None else "1"
    assert [left(engine) for engine in engines] == [local, "quarantined"]
    heal(engines, 1)


@pytest.mark.guarantee("several-engines", fault="the network stalls after the vote")
@pytest.mark.parametrize(("way", "found"), [("to_engine", "quarantined"), ("to_trainer", "1")])
def test_it_stalls_after_the_vote(
    way: str, found: str, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit, or the answer to it, is under way for ever. What was decided stays so: the next
    try at this version sends nothing."""
    engines = engines_on(network)
    send = RelayClient.send

    def stall(self: RelayClient, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        if message["op"] == "commit":
            network.to_trainer = 0
            if way == "to_engine":
                network.to_engine = 0
        send(self, message, fds)

    with monkeypatch.context() as patch:
        patch.setattr(RelayClient, "send", stall)
        with pytest.raises(EngineError, match=r"committed on 1 of 2 .*engine 1"):
            update(toy.checkpoint(1), engines, version=1)
    engines[1].control({"op": "end"})
    assert [left(engine) for engine in engines] == ["1", found]
    assert heal(engines, 1).bytes == 0


@pytest.mark.guarantee("several-engines", fault="the network stalls in a change")
@pytest.mark.parametrize("require", [None, 1])
def test_it_stalls_in_a_change(require: int | None, network: Network) -> None:
    """Nothing was written on the remote engine, but it cannot know whether the other commits: it is
    quarantined, unlike one that is updated alone."""
    engines = engines_on(network, IMAGE_BYTES)
    tensors = step(toy.checkpoint(0), 1, part=0.01)
    network.to_engine = IN_THE_CHANGES
    if require is None:
        with pytest.raises(EngineError, match=r"engine 1: .*took longer"):
            update(tensors, engines, version=1)
        assert states(*engines) == [State.QUARANTINED] * 2
    else:
        assert list(update(tensors, engines, version=1, require=require).failed) == ["engine 1"]
        assert states(*engines) == [State.SERVING, State.QUARANTINED]
        assert holds(engines[0], tensors)
    heal(engines, 2)
