"""Updates of an engine on another host: real sessions and TCP, ranks in threads, no SGLang."""

import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from sgl_fp8rl.ops.delta import apply
from sgl_fp8rl.protocol import framing, image
from sgl_fp8rl.protocol.place import here
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver import rank_server
from sgl_fp8rl.receiver.relay.changes import SessionChanges
from sgl_fp8rl.receiver.relay.door import MOST_STRANGERS
from sgl_fp8rl.receiver.session import Session
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.session import participant, transaction
from trainer_bridge.session.kept import KEPT
from trainer_bridge.sources.parameters import Source
from trainer_bridge.transfer import packer
from trainer_bridge.transport import rank_client
from trainer_bridge.transport.relay_client import RelayClient
from trainer_bridge.updates.update import update

pytestmark = pytest.mark.timeout(120)

SMALL = 2 * 128 * 256 * 2
"""Bytes: half of it holds 128 rows of the widest BF16 matrix."""
IMAGE_BYTES = 4 << 20
"""More than the toy model has."""
GONE_S = 20.0


def remote_engine(
    tp: int = 1,
    bucket_bytes: int = 1 << 20,
    image_bytes: int = 0,
    kind: type[FakeEngine] = FakeEngine,
    device: str = "cpu",
) -> FakeEngine:
    """An engine whose sockets and memory this process cannot reach."""
    ranks = [toy.engine(toy.toy(rank, tp).to(device), toy.SHAPES) for rank in range(tp)]
    engine = kind(ranks, bucket_bytes, image_bytes)
    engine.place = {**here(), "boot": "of another kernel"}
    return engine


def holds(engine: FakeEngine, tensors: toy.Tensors) -> bool:
    return all(
        toy.same(toy.contents(w.model), toy.expected(tensors, rank, len(engine.ranks)))
        for rank, w in enumerate(engine.ranks)
    )


def hang_up(engine: FakeEngine) -> None:
    """Let go of an engine; what its host made for this trainer is gone then."""
    KEPT.connection_to(engine).hang_up()
    engine.relays.clear()
    deadline = time.monotonic() + GONE_S
    while engine.memories.by_name:
        for weights in engine.ranks:  # as the engine does at each step
            weights.memory.close_if_orphaned()
        assert time.monotonic() < deadline, "the relay keeps the memory of a trainer that left"
        time.sleep(0.01)


def begin_by_hand(engine: FakeEngine, which: int = 0) -> dict[str, Any]:
    """The relay of a session that sends what the engine was sent before.

    Args:
        which: of the manifests that it knows.
    """
    fingerprint = [*engine.ranks[0]._writers][which]
    begin = {"op": "begin", "run": "r", "version": 7, "transaction": "t", "retry": False}
    begin |= {"engines": 1, "relay": True, "in_flight": "abort", "fingerprint": fingerprint}
    return engine.control(begin)


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
    engine = remote_engine(tp, bucket_bytes)
    for version in range(3):
        tensors = toy.checkpoint(version)
        update(iter(tensors.items()) if stream else tensors, engine, version=version)
        assert holds(engine, tensors)
        assert [w.policy.version for w in engine.ranks] == [version] * tp
    assert not no_socket_of_a_rank
    assert len(engine.memories.by_name) == 1, "one bucket for all ranks, kept between updates"
    hang_up(engine)


def test_codes_and_scales_travel() -> None:
    """What the engine keeps in FP8, once it has said so; a local engine on a CPU is sent BF16."""
    local, remote = FakeEngine([toy.engine(toy.toy(), toy.SHAPES)]), remote_engine(2)
    tensors = toy.checkpoint(0)
    fp8 = [tensors[name] for name in toy.FP8_NAMES]
    scales = sum(4 * math.prod(-(-size // 128) for size in weight.shape) for weight in fp8)
    sent = [[update(tensors, e, version=v).bytes for v in range(2)] for e in (local, remote)]
    assert holds(local, tensors) and holds(remote, tensors)
    bf16 = sum(2 * tensor.numel() for tensor in tensors.values())
    assert sent == [[bf16] * 2, [bf16 - sum(w.numel() for w in fp8) + scales] * 2]


def test_masters_in_fp32_make_the_codes_of_bf16() -> None:
    engine = remote_engine()
    for version in range(2):
        tensors = toy.checkpoint(version)
        update({name: t.float() for name, t in tensors.items()}, engine, version=version)
        assert holds(engine, tensors)


def test_a_large_weight_is_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packer, "ENCODED_AT_ONCE", 128 * 128)
    engine = remote_engine()
    for version in range(2):
        update(toy.checkpoint(version), engine, version=version)
        assert holds(engine, toy.checkpoint(version))


def test_a_trainer_may_be_silent_between_updates() -> None:
    """Its steps take longer than any pause within an update may; the bucket is not made anew."""
    engine = remote_engine()
    engine.silence_s = 4.0
    update(toy.checkpoint(0), engine, version=0)
    (bucket,) = engine.memories.by_name
    time.sleep(1.5 * engine.silence_s)
    update(toy.checkpoint(1), engine, version=1)
    assert list(engine.memories.by_name) == [bucket]
    assert holds(engine, toy.checkpoint(1))


def test_a_local_and_a_remote_engine_commit_together() -> None:
    local = FakeEngine([toy.engine(toy.toy(), toy.SHAPES)])
    remote = remote_engine(2)
    for version in range(2):
        tensors = toy.checkpoint(version)
        update(tensors, [local, remote], version=version)
        assert holds(local, tensors) and holds(remote, tensors)


def test_engines_of_several_hosts_share_what_is_sent() -> None:
    """Each sees other GPUs; weights are quantized, and kept, once for all."""
    engines = [remote_engine(1, SMALL, IMAGE_BYTES) for _ in range(2)]
    for number, engine in enumerate(engines):
        engine.visible_gpus = [f"GPU {number}"]
    for version in range(2):
        update(step(toy.checkpoint(0), version), engines, version=version)
    connections = [KEPT.connection_to(engine) for engine in engines]
    assert len({id(connection.sender) for connection in connections}) == 1
    bases = [connection.base for connection in connections]
    assert bases[0] is not None and bases[0] is bases[1]
    assert all(holds(engine, step(toy.checkpoint(0), 1)) for engine in engines)


@pytest.mark.guarantee("quarantine", fault="NaN in an update of an engine on another host")
def test_nan_quarantines_and_the_next_update_heals() -> None:
    engine = remote_engine(2)
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


@contextmanager
def failing_in_chunk(number: int, how: str) -> Iterator[None]:
    """The connection "breaks" or "stalls" in the middle of what is sent of one chunk."""
    whole, sent = socket.socket.sendall, 0

    def sendall(self: socket.socket, data: bytes) -> None:
        nonlocal sent
        if self.family == socket.AF_INET and isinstance(data, memoryview):
            sent += 1
            if sent == number:
                whole(self, data[: len(data) // 2])
                if how == "breaks":
                    self.shutdown(socket.SHUT_RDWR)
                return
        whole(self, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "sendall", sendall)
        yield
    assert sent >= number


@pytest.mark.guarantee("quarantine", fault="the network stalls or breaks in the middle of a chunk")
@pytest.mark.parametrize("how", ["breaks", "stalls"])
def test_a_connection_that_fails_in_a_chunk(how: str) -> None:
    """The trainer and the engine both learn of it, and no rank goes on with what it has."""
    engine = remote_engine(2, SMALL)
    update(toy.checkpoint(0), engine, version=0)
    engine.silence_s = 3.0 if how == "stalls" else 30.0
    with failing_in_chunk(3, how), pytest.raises(EngineError, match=r"ended|gone|silent"):
        update(toy.checkpoint(1), engine, version=1)
    assert {w.state for w in engine.ranks} == {State.QUARANTINED}
    engine.silence_s = 30.0
    update(toy.checkpoint(2), engine, version=2)
    assert holds(engine, toy.checkpoint(2))


def test_a_peer_without_the_token_is_turned_away() -> None:
    engine = remote_engine()
    before = toy.contents(engine.ranks[0].model)
    begin = engine.control

    def intruded(message: dict[str, object], timeout_s: float) -> dict[str, object]:
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


@pytest.mark.guarantee("all-or-none", fault="silent connections to an engine's relay")
@pytest.mark.parametrize("silent", [5, MOST_STRANGERS + 8])
def test_silent_peers_hold_up_nobody(silent: int) -> None:
    """More than could be heard one after the other, and more than are heard at a time."""
    engine = remote_engine()
    begin = engine.control
    with ExitStack() as stack:

        def crowded(message: dict[str, object], timeout_s: float) -> dict[str, object]:
            reply = begin(message)
            if "relay" in reply:
                address = "127.0.0.1", reply["relay"]["port"]
                for number in range(silent):
                    peer = stack.enter_context(socket.create_connection(address))
                    peer.sendall(b"\0" * (number % 4))  # a hello that does not go on
            return reply

        engine.control = crowded  # type: ignore[method-assign]
        for version in range(2):
            update(toy.checkpoint(version), engine, version=version)
            assert holds(engine, toy.checkpoint(version))


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"op": "bucket", "name": "b", "bytes": 1 << 40}, "bucket is 1099511627776 bytes"),
        ({"op": "bucket", "name": "b", "bytes": -1}, "bucket is -1 bytes"),
        ({"op": "bucket", "name": 3, "bytes": 512}, "install the same sgl-fp8rl"),
        ({"op": "chunk", "index": 0, "offset": 0, "bytes": 0}, "before its bucket"),
        ({"op": "chunk", "index": 0}, "before its bucket"),
    ],
)
def test_memory_that_is_not_there_ends_the_session(message: dict[str, object], why: str) -> None:
    engine = remote_engine(2)
    update(toy.checkpoint(0), engine, version=0)
    hang_up(engine)
    relayed = begin_by_hand(engine)
    with socket.create_connection(("127.0.0.1", relayed["relay"]["port"])) as peer:
        peer.settimeout(GONE_S)
        framing.send(peer, {"token": relayed["token"]})
        assert framing.receive(peer)[0]["known"] == []
        framing.send(peer, message)
        (reply,) = framing.receive(peer)[0]["replies"]
        assert why in reply["error"]
    assert engine.control({"op": "end"}) == {"ended": True}
    assert {w.state for w in engine.ranks} == {State.SERVING}, "nothing was written"


# -- only what changed


def step(tensors: toy.Tensors, seed: int, part: float = 0.001) -> toy.Tensors:
    """The weights after a small step of an optimizer: a part of them changes by an ulp or two."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in tensors.items():
        changes = torch.rand(tensor.shape, generator=generator) < part
        found[name] = torch.where(changes, tensor * 1.01, tensor)
    return found


def forget(engine: FakeEngine) -> None:
    """No rank knows which update it holds, as after one from this host."""
    for weights in engine.ranks:
        weights._image = None


# 20 s alone, more than 120 beside three other suites on two cores
@pytest.mark.timeout(600)
@pytest.mark.guarantee("all-or-none", fault="200 updates of what changed, with faults between")
@pytest.mark.parametrize("tp", [1, 2])
def test_changes_leave_the_bytes_of_a_full_update(tp: int) -> None:
    engine = remote_engine(tp, SMALL, IMAGE_BYTES)
    tensors = toy.checkpoint(0)
    first = update(tensors, engine, version=0)
    assert first.network_bytes >= first.bytes
    sent = []
    for version in range(1, 201):
        before, tensors = tensors, step(tensors, version)
        if version % 20 == 5:  # found when most chunks are written
            bad = {**tensors, "norm.weight": torch.full((toy.HIDDEN,), torch.nan)}
            with pytest.raises(EngineError, match="NaN"):
                update({n: t.to(torch.bfloat16) for n, t in bad.items()}, engine, version=version)
            assert {w.state for w in engine.ranks} == {State.SERVING}, "it went back"
            assert holds(engine, before), version
        if version % 20 == 10:
            with failing_in_chunk(2, "breaks"), pytest.raises(EngineError):
                update(tensors, engine, version=version)
            assert holds(engine, before), version
        if version % 20 == 15:
            forget(engine)
        if version % 20 == 0:
            tensors = toy.checkpoint(version)
        result = update(tensors, engine, version=version)
        assert holds(engine, tensors), version
        if version % 5:
            sent.append(result.network_bytes / result.bytes)
        else:
            assert result.network_bytes > 0.3 * result.bytes or version % 20 in (5, 10), version
    # 0.1% of BF16 changes: 1 or 2 bytes, 3 bytes a record; codes change less often
    assert max(sent) < 0.02, max(sent)


@pytest.mark.guarantee("one-version", fault="the network breaks or stalls in a change")
@pytest.mark.parametrize("how", ["breaks", "stalls"])
@pytest.mark.parametrize("chunk", [1, 3])
def test_a_change_that_is_torn_changes_nothing(how: str, chunk: int) -> None:
    """All changes are on the engine's host before a rank writes the first of them."""
    engine = remote_engine(2, SMALL, IMAGE_BYTES)
    tensors = toy.checkpoint(0)
    update(tensors, engine, version=0)
    engine.silence_s = 3.0 if how == "stalls" else 30.0
    with failing_in_chunk(chunk, how), pytest.raises(EngineError, match=r"ended|gone|silent"):
        update(step(tensors, 1), engine, version=1)
    assert {w.state for w in engine.ranks} == {State.SERVING}
    assert {w.policy.version for w in engine.ranks} == {0}
    assert holds(engine, tensors)
    engine.silence_s = 30.0
    result = update(step(tensors, 2), engine, version=2)
    assert result.network_bytes < 0.1 * result.bytes
    assert holds(engine, step(tensors, 2))


@pytest.mark.guarantee("all-or-none", fault="the trainer is interrupted between two commits")
def test_changes_are_not_undone_after_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine has committed, so the other one must not go back to the version before."""
    engines = [remote_engine(1, SMALL, IMAGE_BYTES) for _ in range(2)]
    tensors = toy.checkpoint(0)
    update(tensors, engines, version=0)

    def interrupted(calls: Any) -> Any:
        for call in calls.values():
            if call.func.__name__ == "commit":
                call()
                raise KeyboardInterrupt
        return at_once(calls)

    at_once = transaction._at_once
    with monkeypatch.context() as patch:
        patch.setattr(transaction, "_at_once", interrupted)
        with pytest.raises(KeyboardInterrupt):
            update(step(tensors, 1), engines, version=1)
    states = [(w.state, w.policy.version) for engine in engines for w in engine.ranks]
    assert states[0] == (State.SERVING, 1) and states[1][0] is State.QUARANTINED
    update(step(tensors, 1), engines, version=1)
    assert all(holds(engine, step(tensors, 1)) for engine in engines)


def test_several_engines_each_get_what_they_lack() -> None:
    """One was restarted; one keeps no image; the others are sent changes."""
    engines = [remote_engine(1, SMALL, IMAGE_BYTES) for _ in range(3)] + [remote_engine(2, SMALL)]
    tensors = toy.checkpoint(0)
    update(tensors, engines, version=0)
    forget(engines[1])
    tensors = step(tensors, 1)
    result = update(tensors, engines, version=1)
    assert all(holds(engine, tensors) for engine in engines)
    assert 2 * result.bytes <= result.network_bytes < 2.1 * result.bytes
    tensors = step(tensors, 2)
    result = update(tensors, engines, version=2)
    assert all(holds(engine, tensors) for engine in engines)
    assert result.bytes <= result.network_bytes < 1.1 * result.bytes


def test_a_whole_update_frees_the_image_of_the_last_one() -> None:
    engine, away = (remote_engine(1, SMALL, IMAGE_BYTES) for _ in range(2))
    tensors = toy.checkpoint(0)
    update(tensors, [engine, away], version=0)
    last = KEPT.connection_to(away).base
    assert last is not None and last.image._chunks
    forget(engine)
    update(tensors, engine, version=1)
    assert not last.image._chunks  # though the other engine was not asked
    tensors = step(tensors, 2)
    update(tensors, [engine, away], version=2)
    assert holds(engine, tensors) and holds(away, tensors)


def test_the_changes_of_another_trainer_are_not_taken_for_ours() -> None:
    """It has updated the engine meanwhile: what this one sends next is whole."""
    engine = remote_engine(1, SMALL, IMAGE_BYTES)
    tensors = toy.checkpoint(0)
    update(tensors, engine, version=0)
    connection = KEPT.connection_to(engine)
    mine, connection.base = connection.base, None  # another process begins without any
    assert mine is not None
    update(toy.checkpoint(5), engine, version=1)
    connection.base = mine
    tensors = step(tensors, 1)
    result = update(tensors, engine, version=2)
    assert result.network_bytes >= result.bytes
    assert holds(engine, tensors)


def test_an_image_that_is_too_large_is_not_kept() -> None:
    engine = remote_engine(1, SMALL, 100_000)
    for version in range(3):
        result = update(toy.checkpoint(version), engine, version=version)
        assert result.network_bytes >= result.bytes
        assert holds(engine, toy.checkpoint(version))
    assert KEPT.connection_to(engine).base is None


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ({"index": 0, "change": 3}, "before its bucket"),
        ({"index": 0, "change": -1, "bucket": True}, "more than its chunk"),
        ({"index": 0, "change": 513, "bucket": True}, "more than its chunk"),
        ({"index": 0, "change": True, "bucket": True}, "cannot be changed"),
        ({"index": None, "change": 3, "bucket": True}, "cannot be changed"),
        ({"index": 0, "change": 3, "bucket": True, "payload": b"\0\0\0"}, "does not fit"),
    ],
)
def test_changes_of_nothing_end_the_session(message: dict[str, object], why: str) -> None:
    engine = remote_engine(2, image_bytes=IMAGE_BYTES)
    update(toy.checkpoint(0), engine, version=0)
    hang_up(engine)
    relayed = begin_by_hand(engine)
    payload, has_bucket = message.pop("payload", b""), message.pop("bucket", False)
    with socket.create_connection(("127.0.0.1", relayed["relay"]["port"])) as peer:
        peer.settimeout(GONE_S)
        framing.send(peer, {"token": relayed["token"]})
        framing.receive(peer)
        if has_bucket:
            framing.send(peer, {"op": "bucket", "name": "b", "bytes": 1 << 20})
            framing.receive(peer)
        framing.send(peer, {"op": "chunk", "offset": 0, "bytes": 512, **message})
        if payload:
            peer.sendall(payload)
            framing.receive(peer)
            framing.send(peer, {"op": "finish"})
        reply, *_ = framing.receive(peer)[0]["replies"]
        assert why in reply["error"]
    assert engine.control({"op": "end"}) == {"ended": True}
    assert {w.state for w in engine.ranks} == {State.SERVING}, "nothing was written"


def test_a_torn_change_of_another_rank_is_missed_by_the_vote() -> None:
    """Half a change, and then nothing; the first rank, which nobody told, has engines vote."""
    engine = remote_engine(1, SMALL, IMAGE_BYTES)
    for version in range(2):
        update(step(toy.checkpoint(0), version), engine, version=version)
    hang_up(engine)
    begun = begin_by_hand(engine, -1)
    writer = [*engine.ranks[0]._writers.values()][-1]

    def place(index: int) -> dict[str, int]:
        slices = writer.chunks[index]
        spec = writer.manifest.tensors[slices[-1].name]
        start, (low, high) = slices[0].offset, slices[-1].rows
        size = slices[-1].offset - start + spec.nbytes // spec.shape[0] * (high - low)
        return {"offset": start, "bytes": size}

    def connected() -> socket.socket:
        peer = socket.create_connection(("127.0.0.1", begun["relay"]["port"]), timeout=GONE_S)
        framing.send(peer, {"token": begun["token"]})
        assert framing.receive(peer)[0]["ok"]
        return peer

    with connected() as first, connected() as other:
        framing.send(first, {"op": "bucket", "name": "bucket", "bytes": SMALL})
        framing.receive(first)
        for index in range(len(writer.chunks)):
            chunk = {"op": "chunk", "index": index, **place(index)}
            size = chunk["bytes"]
            if index == 0:
                framing.send(other, {**chunk, "change": size})
                other.sendall(b"\0" * (size // 2))
                other.shutdown(socket.SHUT_RDWR)
                continue
            framing.send(first, {**chunk, "change": 0})
            framing.receive(first)
        framing.send(first, {"op": "finish"})
        while "progress" in (answer := framing.receive(first)[0]):
            continue
        assert "missing" in answer["replies"][0]["error"]
    assert engine.control({"op": "end"})["ended"]
    assert {w.state for w in engine.ranks} == {State.SERVING}, "the other changes were undone"
    assert holds(engine, step(toy.checkpoint(0), 1))


def slow_reads(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """A trainer that takes so long to gather each parameter."""
    read = Source.read

    def slow(self: Source, parameter: torch.Tensor) -> torch.Tensor:
        time.sleep(seconds)
        return read(self, parameter)

    patch.setattr(Source, "read", slow)


def test_ranks_hear_of_a_slow_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the engine's host only collects what changes."""
    engine = remote_engine(2, SMALL, IMAGE_BYTES)
    tensors = toy.checkpoint(0)
    update(tensors, engine, version=0)
    engine.silence_s = 4.5
    slow_reads(monkeypatch, 6.0 / len(tensors))
    update(step(tensors, 1), engine, version=1)
    assert holds(engine, step(tensors, 1))


def test_each_chunk_may_take_the_time_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = remote_engine(1, SMALL, IMAGE_BYTES)
    tensors = toy.checkpoint(0)
    update(tensors, engine, version=0)
    change = Session.change

    def slow(self: Session, index: int, size: int) -> None:
        time.sleep(0.8)
        change(self, index, size)

    monkeypatch.setattr(participant, "STEP_TIMEOUT_S", 3.0)
    monkeypatch.setattr(Session, "change", slow)
    began = time.monotonic()
    update(step(tensors, 1), [engine], version=1)
    assert time.monotonic() - began > 2 * participant.STEP_TIMEOUT_S
    assert holds(engine, step(tensors, 1))


def test_streams_go_on_after_an_engine_that_was_not_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = remote_engine(1, SMALL, IMAGE_BYTES)
    tensors = toy.checkpoint(0)
    update(iter(tensors.items()), engine, version=0)
    with monkeypatch.context() as patch:
        patch.setattr(rank_server, "CONNECT_TIMEOUT_S", 0.5)

        def unreachable(*_: object) -> None:
            raise OSError("no route to host")

        patch.setattr(socket, "create_connection", unreachable)
        with pytest.raises(EngineError, match="no route to host"):
            update(iter(tensors.items()), engine, version=1)
    sent = []
    for version in range(2, 6):
        tensors = step(tensors, version)
        sent.append(update(iter(tensors.items()), engine, version=version))
        assert holds(engine, tensors)
    assert sent[-1].network_bytes < 0.1 * sent[-1].bytes


def test_a_commit_whose_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C: the engine holds an update that its trainer has no image of."""
    engine = remote_engine(2, SMALL, IMAGE_BYTES)
    before = toy.checkpoint(0)
    update(before, engine, version=0)
    ask = RelayClient.ask

    def interrupted(self: RelayClient, message: dict[str, Any], fds: Any = ()) -> Any:
        if message["op"] != "commit":
            return ask(self, message, fds)
        self.send(message, fds)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RelayClient, "ask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            update(step(before, 1), engine, version=1)
    result = update(before, engine, version=2)
    assert result.network_bytes >= result.bytes
    assert holds(engine, before)


def test_an_image_whose_change_is_interrupted_is_no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C on the trainer; an engine that was not in this update still has the one before."""
    engines = [remote_engine(1, SMALL, IMAGE_BYTES) for _ in range(2)]
    tensors = toy.checkpoint(0)
    update(tensors, engines, version=0)
    left = [3]

    def interrupted(content: torch.Tensor, delta: torch.Tensor) -> None:
        if threading.current_thread() is threading.main_thread():
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
        apply(content, delta)

    with monkeypatch.context() as patch:
        patch.setattr(image, "apply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            update(step(tensors, 1), engines[0], version=1)
    tensors = step(tensors, 2)
    for version, engine in enumerate(reversed(engines), 2):
        result = update(tensors, engine, version=version)
        assert result.network_bytes >= result.bytes
        assert holds(engine, tensors)


def no_memory(*_: object) -> None:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def test_a_relay_that_fails_tells_the_trainer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = remote_engine(1, SMALL, IMAGE_BYTES)
    tensors = toy.checkpoint(0)
    update(tensors, engine, version=0)

    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(SessionChanges, "room_for", no_memory)
        with pytest.raises(EngineError, match="can't allocate memory"):
            update(step(tensors, 1), engine, version=1)
    assert time.monotonic() - began < GONE_S < engine.silence_s
    assert {w.state for w in engine.ranks} == {State.SERVING}
    update(step(tensors, 2), engine, version=2)
    assert holds(engine, step(tensors, 2))


def test_after_two_failures_no_base_is_kept() -> None:
    """Also that of an engine that holds another one than changes were of."""
    engines = [remote_engine(1, SMALL, IMAGE_BYTES) for _ in range(2)]
    tensors = toy.checkpoint(0)
    for engine in engines:
        update(tensors, engine, version=0)
    connections = [KEPT.connection_to(engine) for engine in engines]
    bad = {name: tensor.clone() for name, tensor in step(tensors, 1).items()}
    next(tensor for tensor in bad.values() if tensor.dim() == 2)[0, 0] = math.nan
    for keeps in (True, False):
        with pytest.raises(EngineError, match="NaN"):
            update(bad, engines, version=1)
        assert [each.base is not None for each in connections] == [keeps, keeps]
    update(step(tensors, 2), engines, version=2)
    assert all(holds(engine, step(tensors, 2)) for engine in engines)


def test_a_trainer_keeps_no_image_that_no_engine_keeps() -> None:
    engine = remote_engine(1, SMALL, IMAGE_BYTES)
    update(toy.checkpoint(0), engine, version=0)
    assert KEPT.connection_to(engine).base is not None
    engine.memories.most_image_bytes = 1000  # restarted with less
    update(toy.checkpoint(1), engine, version=1)
    assert KEPT.connection_to(engine).base is None
    engine.memories.most_image_bytes = IMAGE_BYTES
    update(toy.checkpoint(2), engine, version=2)
    assert KEPT.connection_to(engine).base is not None
    engine.memories.most_image_bytes = 0
    update(toy.checkpoint(3), engine, version=3)
    assert KEPT.connection_to(engine).base is None
