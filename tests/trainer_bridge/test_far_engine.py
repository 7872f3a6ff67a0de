"""Updates of an engine on another host: real sessions and TCP, ranks in threads, no SGLang."""

import math
import socket
import time
from collections.abc import Iterator

import pytest
import torch

from sgl_fp8rl.protocol import framing
from sgl_fp8rl.protocol.place import here
from sgl_fp8rl.protocol.states import State
from tests.sgl_fp8rl.engine.fake_engine import FakeEngine
from tests.sgl_fp8rl.weight_update import toy
from trainer_bridge import packer
from trainer_bridge.connections import connection_to
from trainer_bridge.engine_client import EngineError
from trainer_bridge.transport import rank_client
from trainer_bridge.update import update

pytestmark = pytest.mark.timeout(120)

SMALL = 2 * 128 * 256 * 2
"""Bytes: half of it holds 128 rows of the widest BF16 matrix."""
GONE_S = 20.0


def far_engine(tp: int = 1, bucket_bytes: int = 1 << 20) -> FakeEngine:
    """An engine whose sockets and memory this process cannot reach."""
    ranks = [toy.engine(toy.toy(rank, tp), toy.SHAPES) for rank in range(tp)]
    engine = FakeEngine(ranks, bucket_bytes)
    engine.place = {**here(), "boot": "of another kernel"}
    return engine


def holds(engine: FakeEngine, tensors: toy.Tensors) -> bool:
    return all(
        toy.same(toy.contents(w.model), toy.expected(tensors, rank, len(engine.ranks)))
        for rank, w in enumerate(engine.ranks)
    )


def hang_up(engine: FakeEngine) -> None:
    """Let go of an engine; what its host made for this trainer is gone then."""
    connection_to(engine).hang_up()
    engine.relays.clear()
    deadline = time.monotonic() + GONE_S
    while engine.memories.by_name:
        for weights in engine.ranks:  # as the engine does at each step
            weights.memory.close_if_orphaned()
        assert time.monotonic() < deadline, "the relay keeps the memory of a trainer that left"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def no_socket_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The trainer may not connect to a rank's own socket; those that it tried."""
    tried: list[str] = []
    connect = rank_client._connect
    monkeypatch.setattr(
        rank_client, "_connect", lambda path, *rest: tried.append(path) or connect(path, *rest)
    )
    yield tried


@pytest.mark.guarantee("all-or-none", fault="an engine on another host, one and two ranks")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1 << 20, SMALL])
@pytest.mark.parametrize("tp", [1, 2])
def test_an_update_over_tcp_leaves_the_oracles_bytes(
    tp: int, bucket_bytes: int, stream: bool, no_socket_of_a_rank: list[str]
) -> None:
    engine = far_engine(tp, bucket_bytes)
    for version in range(3):
        tensors = toy.checkpoint(version)
        update(iter(tensors.items()) if stream else tensors, engine, version=version)
        assert holds(engine, tensors)
        assert [w.policy.version for w in engine.ranks] == [version] * tp
    assert not no_socket_of_a_rank
    assert len(engine.memories.by_name) == 1, "one bucket for all ranks, kept between updates"
    hang_up(engine)


def test_codes_and_scales_travel() -> None:
    """What the engine keeps in FP8, once it has said so; a near engine on a CPU is sent BF16."""
    near, far = FakeEngine([toy.engine(toy.toy(), toy.SHAPES)]), far_engine(2)
    tensors = toy.checkpoint(0)
    fp8 = [tensors[name] for name in toy.FP8_NAMES]
    scales = sum(4 * math.prod(-(-size // 128) for size in weight.shape) for weight in fp8)
    sent = [[update(tensors, e, version=v).bytes for v in range(2)] for e in (near, far)]
    assert holds(near, tensors) and holds(far, tensors)
    bf16 = sum(2 * tensor.numel() for tensor in tensors.values())
    assert sent == [[bf16] * 2, [bf16 - sum(w.numel() for w in fp8) + scales] * 2]


def test_masters_in_fp32_make_the_codes_of_bf16() -> None:
    engine = far_engine()
    for version in range(2):
        tensors = toy.checkpoint(version)
        update({name: t.float() for name, t in tensors.items()}, engine, version=version)
        assert holds(engine, tensors)


def test_a_large_weight_is_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packer, "ENCODED_AT_ONCE", 128 * 128)
    engine = far_engine()
    for version in range(2):
        update(toy.checkpoint(version), engine, version=version)
        assert holds(engine, toy.checkpoint(version))


def test_a_trainer_may_be_silent_between_updates() -> None:
    """Its steps take longer than any pause within an update may; the bucket is not made anew."""
    engine = far_engine()
    engine.silence_s = 0.5
    update(toy.checkpoint(0), engine, version=0)
    (bucket,) = engine.memories.by_name
    time.sleep(3 * engine.silence_s)
    update(toy.checkpoint(1), engine, version=1)
    assert list(engine.memories.by_name) == [bucket]
    assert holds(engine, toy.checkpoint(1))


def test_an_engine_here_and_one_far_away_commit_together() -> None:
    near = FakeEngine([toy.engine(toy.toy(), toy.SHAPES)])
    far = far_engine(2)
    for version in range(2):
        tensors = toy.checkpoint(version)
        update(tensors, [near, far], version=version)
        assert holds(near, tensors) and holds(far, tensors)


@pytest.mark.guarantee("quarantine", fault="NaN in an update of an engine on another host")
def test_nan_quarantines_and_the_next_update_heals() -> None:
    engine = far_engine(2)
    tensors = toy.checkpoint(0)
    update(tensors, engine, version=0)
    bad = {name: tensor.clone() for name, tensor in toy.checkpoint(1).items()}
    name = next(name for name, tensor in bad.items() if tensor.dim() == 2)
    bad[name].view(-1)[-1] = torch.nan
    with pytest.raises(EngineError, match=r"NaN"):
        update(bad, engine, version=1)
    assert {w.state for w in engine.ranks} == {State.QUARANTINED}
    update(toy.checkpoint(2), engine, version=2)
    assert holds(engine, toy.checkpoint(2))


@pytest.mark.guarantee("quarantine", fault="the network stalls or breaks in the middle of a chunk")
@pytest.mark.parametrize("how", ["breaks", "stalls"])
def test_a_connection_that_fails_in_a_chunk(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The trainer and the engine both learn of it, and no rank goes on with what it has."""
    engine = far_engine(2, SMALL)
    update(toy.checkpoint(0), engine, version=0)
    engine.silence_s = 1.0
    whole, sent = socket.socket.sendall, 0

    def sendall(self: socket.socket, data: bytes) -> None:
        nonlocal sent
        if self.family == socket.AF_INET and isinstance(data, memoryview):
            sent += 1
            if sent == 3:
                whole(self, data[: len(data) // 2])
                if how == "breaks":
                    self.shutdown(socket.SHUT_RDWR)
                return
        whole(self, data)

    monkeypatch.setattr(socket.socket, "sendall", sendall)
    with pytest.raises(EngineError, match=r"ended|gone|silent"):
        update(toy.checkpoint(1), engine, version=1)
    monkeypatch.setattr(socket.socket, "sendall", whole)
    assert {w.state for w in engine.ranks} == {State.QUARANTINED}
    engine.silence_s = 30.0
    update(toy.checkpoint(2), engine, version=2)
    assert holds(engine, toy.checkpoint(2))


def test_a_peer_without_the_token_is_turned_away() -> None:
    engine = far_engine()
    before = toy.contents(engine.ranks[0].model)
    begin = engine.control

    def intruded(message: dict[str, object]) -> dict[str, object]:
        reply = begin(message)
        if "relay" in reply:
            for hello in ({"token": "another"}, {"token": 1}, {}):
                with socket.create_connection(("127.0.0.1", reply["relay"]["port"])) as peer:
                    framing.send(peer, hello)
                    assert "another session" in framing.receive(peer)[0]["error"]
        return reply

    engine.control = intruded  # type: ignore[method-assign]
    update(toy.checkpoint(0), engine, version=0)
    assert holds(engine, toy.checkpoint(0)) and not toy.same(
        before, toy.contents(engine.ranks[0].model)
    )


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"op": "bucket", "name": "b", "bytes": 1 << 40}, "bucket is 1099511627776 bytes"),
        ({"op": "bucket", "name": "b", "bytes": -1}, "bucket is -1 bytes"),
        ({"op": "bucket", "name": 3, "bytes": 512}, "install one sgl-fp8rl"),
        ({"op": "chunk", "index": 0, "offset": 0, "bytes": 0}, "before its bucket"),
        ({"op": "chunk", "index": 0}, "before its bucket"),
    ],
)
def test_memory_that_is_not_there_ends_the_session(message: dict[str, object], why: str) -> None:
    engine = far_engine(2)
    update(toy.checkpoint(0), engine, version=0)
    hang_up(engine)
    relayed = engine.control(
        {
            "op": "begin",
            "run": "r",
            "version": 7,
            "transaction": "t",
            "retry": False,
            "engines": 1,
            "relay": True,
            "in_flight": "abort",
            "fingerprint": next(iter(engine.ranks[0]._writers)),
        }
    )
    with socket.create_connection(("127.0.0.1", relayed["relay"]["port"])) as peer:
        peer.settimeout(GONE_S)
        framing.send(peer, {"token": relayed["token"]})
        assert framing.receive(peer)[0]["known"] == []
        framing.send(peer, message)
        (reply,) = framing.receive(peer)[0]["replies"]
        assert why in reply["error"]
    assert engine.control({"op": "end"}) == {"ended": True}
    assert {w.state for w in engine.ranks} == {State.SERVING}, "nothing was written"
