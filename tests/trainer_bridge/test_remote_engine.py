"""Updates of an engine on another host: real sessions and TCP, ranks in threads, no SGLang."""

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import count
from typing import Any

import pytest
import torch

from sgl_fp8rl.protocol import framing, snapshot
from sgl_fp8rl.protocol.place import here
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver import rank_server
from sgl_fp8rl.receiver.relay.changes import SessionChanges
from sgl_fp8rl.receiver.relay.door import MOST_STRANGERS
from sgl_fp8rl.receiver.session import Session
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge.test_update import SMALL, holds
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.session import participant, transaction
from trainer_bridge.session.kept import KEPT
from trainer_bridge.sources.parameters import Source
from trainer_bridge.transfer import packer
from trainer_bridge.transport.relay_client import RelayClient
from trainer_bridge.updates.update import update

pytestmark = pytest.mark.timeout(120)

SNAPSHOT_BYTES = 4 << 20
"""More than the toy model has."""
GONE_S = 20.0


def remote_engine(
    tp: int = 1,
    bucket_bytes: int = 1 << 20,
    snapshot_bytes: int = 0,
    kind: type[FakeEngine] = FakeEngine,
    device: str = "cpu",
) -> FakeEngine:
    """An engine whose sockets and memory this process cannot reach."""
    ranks = [toy.engine(toy.toy(rank, tp).to(device), toy.SHAPES) for rank in range(tp)]
    engine = kind(ranks, bucket_bytes, snapshot_bytes)
    engine.place = {**here(), "boot": "of another kernel"}
    return engine


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


def sent(engines: Any, tensors: toy.Tensors, version: int, stream: bool = False) -> float:
    """An update after which all engines hold the oracle's bytes: what of it went over the network,
    for each byte of the weights."""
    result = update(iter(tensors.items()) if stream else tensors, engines, version=version)
    for engine in engines if isinstance(engines, list) else [engines]:
        assert holds(engine, tensors), version
    return result.network_bytes / result.bytes


def with_snapshots(count: int = 1, tp: int = 1) -> list[FakeEngine]:
    """Engines that keep what changes can be sent of: version 0."""
    engines = [remote_engine(tp, SMALL, SNAPSHOT_BYTES) for _ in range(count)]
    sent(engines, toy.checkpoint(0), 0)
    return engines


def test_a_large_weight_is_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packer, "ENCODED_AT_ONCE", 128 * 128)
    engine = remote_engine()
    for version in range(2):
        sent(engine, toy.checkpoint(version), version)


def test_a_trainer_may_be_silent_between_updates() -> None:
    """Its steps take longer than any pause within an update may; the bucket is not made anew."""
    engine = remote_engine()
    engine.silence_s = 4.0
    sent(engine, toy.checkpoint(0), 0)
    (bucket,) = engine.memories.by_name
    time.sleep(1.5 * engine.silence_s)
    sent(engine, toy.checkpoint(1), 1)
    assert list(engine.memories.by_name) == [bucket]


def test_engines_of_several_hosts_share_what_is_sent() -> None:
    """Each sees other GPUs; weights are quantized, and kept, once for all."""
    engines = [remote_engine(1, SMALL, SNAPSHOT_BYTES) for _ in range(2)]
    for number, engine in enumerate(engines):
        engine.visible_gpus = [f"GPU {number}"]
    for version in range(2):
        sent(engines, step(toy.checkpoint(0), version), version)
    one, other = map(KEPT.connection_to, engines)
    assert one.sender is other.sender is not None
    assert one.base is other.base is not None


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


@contextmanager
def interrupted(owner: Any, name: str, where: Callable[..., bool]) -> Iterator[None]:
    """Ctrl-C in the place of a call that ``where`` chooses by its arguments."""
    whole = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        if where(*args):
            raise KeyboardInterrupt
        return whole(*args, **options)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, call)
        yield


@pytest.mark.guarantee("quarantine", fault="the network stalls or breaks in the middle of a chunk")
@pytest.mark.guarantee("quarantine", fault="NaN in an update of an engine on another host")
@pytest.mark.parametrize("how", ["breaks", "stalls", "NaN"])
def test_an_update_that_fails_in_a_chunk(how: str) -> None:
    """The trainer and the engine both learn of it, and no rank goes on with what it has."""
    engine, tensors = remote_engine(2, SMALL), toy.checkpoint(1)
    sent(engine, toy.checkpoint(0), 0)
    engine.silence_s = 3.0 if how == "stalls" else 30.0
    if how == "NaN":
        tensors["attn.o.weight"][-1, -1] = torch.nan
    failing = nullcontext() if how == "NaN" else failing_in_chunk(3, how)
    with failing, pytest.raises(EngineError, match=r"ended|gone|silent|attn.o.weight holds NaN"):
        update(tensors, engine, version=1)
    assert {w.state for w in engine.ranks} == {State.QUARANTINED}
    engine.silence_s = 30.0
    sent(engine, toy.checkpoint(2), 2)


def test_a_peer_without_the_token_is_turned_away() -> None:
    engine = remote_engine()
    begin = engine._begin

    def intruded(message: dict[str, Any]) -> dict[str, Any]:
        reply = begin(message)
        for hello in ({"token": "another"}, {"token": 1}, {}) if "relay" in reply else ():
            with socket.create_connection(("127.0.0.1", reply["relay"]["port"])) as peer:
                framing.send(peer, hello)
                assert "another session" in framing.receive(peer)[0]["error"]
        return reply

    engine._begin = intruded  # type: ignore[method-assign]
    sent(engine, toy.checkpoint(0), 0)


@pytest.mark.guarantee("all-or-none", fault="silent connections to an engine's relay")
@pytest.mark.parametrize("silent", [5, MOST_STRANGERS + 8])
def test_silent_peers_hold_up_nobody(silent: int) -> None:
    """More than could be heard one after the other, and more than are heard at a time."""
    engine = remote_engine()
    begin = engine._begin
    with ExitStack() as stack:

        def crowded(message: dict[str, Any]) -> dict[str, Any]:
            reply = begin(message)
            for number in range(silent) if "relay" in reply else ():
                address = "127.0.0.1", reply["relay"]["port"]
                peer = stack.enter_context(socket.create_connection(address))
                peer.sendall(b"\0" * (number % 4))  # a hello that does not go on
            return reply

        engine._begin = crowded  # type: ignore[method-assign]
        for version in range(2):
            sent(engine, toy.checkpoint(version), version)


BUCKET = {"op": "bucket", "name": "b", "bytes": SMALL}
CHUNK = {"op": "chunk", "offset": 0, "bytes": 512, "index": 0}


@contextmanager
def connected(begun: dict[str, Any]) -> Iterator[socket.socket]:
    """A connection to the relay of a session."""
    address = "127.0.0.1", begun["relay"]["port"]
    with socket.create_connection(address, timeout=GONE_S) as peer:
        framing.send(peer, {"token": begun["token"]})
        assert framing.receive(peer)[0]["known"] == []
        yield peer


@pytest.mark.parametrize(
    ("sound", "message", "why"),
    [
        ([], {**BUCKET, "bytes": 1 << 40}, "bucket is 1099511627776 bytes"),
        ([], {**BUCKET, "bytes": -1}, "bucket is -1 bytes"),
        ([], {**BUCKET, "name": 3}, "install the same sgl-fp8rl"),
        ([], {**CHUNK, "bytes": 0}, "before its bucket"),
        ([], {"op": "chunk", "index": 0}, "before its bucket"),
        ([], {**CHUNK, "change": 3}, "before its bucket"),
        ([BUCKET], {**CHUNK, "change": -1}, "more than its chunk"),
        ([BUCKET], {**CHUNK, "change": 513}, "more than its chunk"),
        ([BUCKET], {**CHUNK, "change": True}, "cannot be changed"),
        ([BUCKET], {**CHUNK, "change": 3, "index": None}, "cannot be changed"),
        ([BUCKET, {**CHUNK, "change": 3}, b"\0\0\0"], {"op": "finish"}, "does not fit"),
    ],
)
def test_what_cannot_be_a_chunk_ends_the_session(sound: list[Any], message: Any, why: str) -> None:
    (engine,) = with_snapshots(tp=2)
    hang_up(engine)
    with connected(begin_by_hand(engine)) as peer:
        for each in sound:
            if isinstance(each, bytes):
                peer.sendall(each)
            else:
                framing.send(peer, each)
            if each is BUCKET or isinstance(each, bytes):
                framing.receive(peer)
        framing.send(peer, message)
        reply, *_ = framing.receive(peer)[0]["replies"]
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
        weights._snapshot = None


# 20 s alone, more than 120 beside three other suites on two cores
@pytest.mark.timeout(600)
@pytest.mark.guarantee("all-or-none", fault="200 updates of what changed, with faults between")
@pytest.mark.parametrize("tp", [1, 2])
def test_changes_leave_the_bytes_of_a_full_update(tp: int) -> None:
    (engine,), tensors, parts = with_snapshots(tp=tp), toy.checkpoint(0), []
    for version in range(1, 201):
        before, tensors = tensors, step(tensors, version)
        if version % 20 == 5:  # found when most chunks are written
            bad = {**tensors, "norm.weight": torch.full((toy.HIDDEN,), torch.nan, dtype=toy.BF16)}
            with pytest.raises(EngineError, match="NaN"):
                update(bad, engine, version=version)
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
        part = sent(engine, tensors, version)
        if version % 5:
            parts.append(part)
        else:
            assert part > 0.3 or version % 20 in (5, 10), version
    # 0.1% of BF16 changes: 1 or 2 bytes, 3 bytes a record; codes change less often
    assert max(parts) < 0.02, max(parts)


@pytest.mark.guarantee("one-version", fault="the network breaks or stalls in a change")
@pytest.mark.parametrize("how", ["breaks", "stalls"])
@pytest.mark.parametrize("chunk", [1, 3])
def test_a_change_that_is_torn_changes_nothing(how: str, chunk: int) -> None:
    """All changes are on the engine's host before a rank writes the first of them."""
    (engine,), tensors = with_snapshots(tp=2), toy.checkpoint(0)
    engine.silence_s = 3.0 if how == "stalls" else 30.0
    with failing_in_chunk(chunk, how), pytest.raises(EngineError, match=r"ended|gone|silent"):
        update(step(tensors, 1), engine, version=1)
    assert {(w.state, w.policy.version) for w in engine.ranks} == {(State.SERVING, 0)}
    assert holds(engine, tensors)
    engine.silence_s = 30.0
    assert sent(engine, step(tensors, 2), 2) < 0.1


@pytest.mark.guarantee("all-or-none", fault="the trainer is interrupted between two commits")
def test_changes_are_not_undone_after_the_decision() -> None:
    """One engine has committed, so the other one must not go back to the version before."""
    engines, tensors = with_snapshots(2), step(toy.checkpoint(0), 1)

    def one_commits(calls: Any) -> bool:
        commits = [call for call in calls.values() if call.func.__name__ == "commit"]
        return bool(commits) and commits[0]() is None

    with interrupted(transaction, "_at_once", one_commits):
        update(tensors, engines, version=1)
    states = [(w.state, w.policy.version) for engine in engines for w in engine.ranks]
    assert states[0] == (State.SERVING, 1) and states[1][0] is State.QUARANTINED
    sent(engines, tensors, 1)


def test_several_engines_each_get_what_they_lack() -> None:
    """One was restarted; one keeps no snapshot; the others are sent changes."""
    engines, tensors = [*with_snapshots(3), remote_engine(2, SMALL)], toy.checkpoint(0)
    sent(engines, tensors, 1)
    forget(engines[1])
    tensors = step(tensors, 1)
    assert 2 <= sent(engines, tensors, 2) < 2.1
    assert 1 <= sent(engines, step(tensors, 2), 3) < 1.1


def test_a_whole_update_frees_the_snapshot_of_the_last_one() -> None:
    engine, away = with_snapshots(2)
    last = KEPT.connection_to(away).base
    assert last is not None and last.snapshot._chunks
    forget(engine)
    sent(engine, toy.checkpoint(0), 1)
    assert not last.snapshot._chunks  # though the other engine was not asked
    sent([engine, away], step(toy.checkpoint(0), 2), 2)


def test_the_changes_of_another_trainer_are_not_taken_for_ours() -> None:
    """It has updated the engine meanwhile: what this one sends next is whole."""
    (engine,) = with_snapshots()
    connection = KEPT.connection_to(engine)
    mine, connection.base = connection.base, None  # another process begins without any
    assert mine is not None
    sent(engine, toy.checkpoint(5), 1)
    connection.base = mine
    assert sent(engine, step(toy.checkpoint(0), 1), 2) >= 1


def test_a_torn_change_of_another_rank_is_missed_by_the_vote() -> None:
    """Half a change, and then nothing; the first rank, which nobody told, has engines vote."""
    (engine,), tensors = with_snapshots(), step(toy.checkpoint(0), 1)
    sent(engine, tensors, 1)
    hang_up(engine)
    begun = begin_by_hand(engine, -1)
    writer = [*engine.ranks[0]._writers.values()][-1]

    def place(index: int) -> dict[str, int]:
        slices = writer.chunks[index]
        spec = writer.manifest.tensors[slices[-1].name]
        start, (low, high) = slices[0].offset, slices[-1].rows
        size = slices[-1].offset - start + spec.nbytes // spec.shape[0] * (high - low)
        return {"offset": start, "bytes": size}

    with connected(begun) as first, connected(begun) as other:
        framing.send(first, BUCKET)
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
    assert holds(engine, tensors)


def test_ranks_hear_of_a_slow_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the engine's host only collects what changes."""
    (engine,), tensors, read = with_snapshots(tp=2), step(toy.checkpoint(0), 1), Source.read
    engine.silence_s = 4.5

    def slow(self: Source, parameter: torch.Tensor) -> torch.Tensor:
        time.sleep(6.0 / len(tensors))
        return read(self, parameter)

    monkeypatch.setattr(Source, "read", slow)
    sent(engine, tensors, 1)


def test_each_chunk_may_take_the_time_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    (engine,), change = with_snapshots(), Session.change

    def slow(self: Session, index: int, size: int) -> None:
        time.sleep(0.8)
        change(self, index, size)

    monkeypatch.setattr(participant, "STEP_TIMEOUT_S", 3.0)
    monkeypatch.setattr(Session, "change", slow)
    began = time.monotonic()
    sent([engine], step(toy.checkpoint(0), 1), 1)
    assert time.monotonic() - began > 2 * participant.STEP_TIMEOUT_S


def test_streams_go_on_after_an_engine_that_was_not_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, tensors = remote_engine(1, SMALL, SNAPSHOT_BYTES), toy.checkpoint(0)
    sent(engine, tensors, 0, stream=True)
    with monkeypatch.context() as patch:
        patch.setattr(rank_server, "CONNECT_TIMEOUT_S", 0.5)

        def unreachable(*_: object) -> None:
            raise OSError("no route to host")

        patch.setattr(socket, "create_connection", unreachable)
        with pytest.raises(EngineError, match="no route to host"):
            update(iter(tensors.items()), engine, version=1)
    for version in range(2, 6):
        tensors = step(tensors, version)
        part = sent(engine, tensors, version, stream=True)
    assert part < 0.1


def test_a_commit_whose_answer_is_lost() -> None:
    """The engine holds an update that its trainer has no snapshot of."""
    (engine,), before = with_snapshots(tp=2), toy.checkpoint(0)

    def commits(client: RelayClient, message: dict[str, Any], fds: Any = ()) -> bool:
        return message["op"] == "commit" and client.send(message, fds) is None

    with interrupted(RelayClient, "ask", commits):
        update(step(before, 1), engine, version=1)
    assert sent(engine, before, 2) >= 1


def test_a_snapshot_whose_change_is_interrupted_is_no_snapshot() -> None:
    """On the trainer; an engine that was not in this update still has the one before."""
    engines, tensors, calls = with_snapshots(2), toy.checkpoint(0), count(1)

    def third(content: torch.Tensor, delta: torch.Tensor) -> bool:
        return threading.current_thread() is threading.main_thread() and next(calls) == 3

    with interrupted(snapshot, "apply", third):
        update(step(tensors, 1), engines[0], version=1)
    for version, engine in enumerate(reversed(engines), 2):
        assert sent(engine, step(tensors, 2), version) >= 1


def test_a_relay_that_fails_tells_the_trainer_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    (engine,), tensors = with_snapshots(), toy.checkpoint(0)

    def no_memory(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(SessionChanges, "room_for", no_memory)
        with pytest.raises(EngineError, match="can't allocate memory"):
            update(step(tensors, 1), engine, version=1)
    assert time.monotonic() - began < GONE_S < engine.silence_s
    assert {w.state for w in engine.ranks} == {State.SERVING}
    sent(engine, step(tensors, 2), 2)


def test_after_two_failures_no_base_is_kept() -> None:
    """Also that of an engine that holds another one than changes were of."""
    engines, tensors = [*with_snapshots(), *with_snapshots()], toy.checkpoint(0)
    connections = [KEPT.connection_to(engine) for engine in engines]
    bad = step(tensors, 1)
    bad["attn.q.weight"][0, 0] = math.nan
    for keeps in (True, False):
        with pytest.raises(EngineError, match="NaN"):
            update(bad, engines, version=1)
        assert [each.base is not None for each in connections] == [keeps, keeps]
    sent(engines, step(tensors, 2), 2)


def test_a_trainer_keeps_no_snapshot_that_no_engine_keeps() -> None:
    """Nor where it is too large: it was restarted with less, or with none, say."""
    (engine,) = with_snapshots()
    connection = KEPT.connection_to(engine)
    assert connection.base is not None
    for version, most in enumerate((1000, 100_000, SNAPSHOT_BYTES, 0), start=1):
        engine.memories.most_snapshot_bytes = most
        assert sent(engine, toy.checkpoint(version), version) >= 1
        assert (connection.base is not None) == (most == SNAPSHOT_BYTES)
