"""One update of several engines: real transport, sockets and sessions, fake schedulers."""

import gc
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver import rank_server
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge.test_update import SMALL, Cut, FailingRank, engine_of, holds
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.rollouts.serving_engines import serving_engines
from trainer_bridge.session import participant, transaction
from trainer_bridge.session.kept import KEPT
from trainer_bridge.session.update_session import UpdateSession
from trainer_bridge.transport.bucket import Bucket
from trainer_bridge.transport.rank_client import EngineRanks
from trainer_bridge.updates.update import RUN, update

pytestmark = pytest.mark.timeout(120)

JOIN_S = 60.0


def serves(engine: FakeEngine, version: int, tensors: toy.Tensors) -> bool:
    known = {(w.state, w.policy.run, w.policy.version) for w in engine.ranks}
    return known == {(State.SERVING, RUN, version)} and holds(engine, tensors)


def states(*engines: FakeEngine) -> list[State]:
    """The one state of each engine's ranks."""
    assert all(len({w.state for w in engine.ranks}) == 1 for engine in engines)
    return [engine.ranks[0].state for engine in engines]


class Dead(FakeEngine):
    """An engine that does not answer some control messages."""

    dead: tuple[str, ...] = ()

    def control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
        if message["op"] in self.dead:
            raise EngineError("cannot be reached", None)
        return super().control(message)


def dead_engine(*dead: str) -> Dead:
    engine = Dead(engine_of(1).ranks)
    engine.dead = dead
    return engine


def failing_engine() -> FakeEngine:
    """Its last rank fails when everything was written."""
    ranks = engine_of(2).ranks
    ranks[1].__class__ = FailingRank
    return FakeEngine(ranks)


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch) -> list[Bucket]:
    """All that are made."""
    made: list[Bucket] = []

    class Kept(Bucket):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr("trainer_bridge.ways.carriers.Bucket", Kept)
    return made


# -- all of them


@pytest.mark.guarantee("several-engines", fault="two engines of one and of two ranks")
def test_engines_of_one_layout_read_one_bucket(buckets: list[Bucket]) -> None:
    engines = [engine_of(1, SMALL), engine_of(1, SMALL), engine_of(2, SMALL)]
    for version in (0, 3):
        tensors = toy.checkpoint(version)
        result = update(tensors, engines, version=version)
        assert all(serves(engine, version, tensors) for engine in engines)
        assert (result.version, result.failed) == (version, {})
        assert result.bytes == sum(t.numel() * 2 for t in tensors.values())
    assert len(buckets) == 1
    tensors = toy.checkpoint(4)
    update(iter(tensors.items()), engines, version=4)
    assert all(serves(engine, 4, tensors) for engine in engines)
    assert len(buckets) == 1


def test_engines_of_other_layouts_have_buckets_of_their_own(buckets: list[Bucket]) -> None:
    """One has dummy weights, so it does not know yet what it keeps in FP32."""
    dummy = FakeEngine([EngineWeights(toy.toy(), toy.BF16)])
    engines, tensors = [engine_of(1), dummy, engine_of(2, SMALL)], toy.checkpoint()
    update(tensors, engines, version=0)
    assert all(serves(engine, 0, tensors) for engine in engines)
    assert len(buckets) == 3
    tensors = toy.checkpoint(1)
    update(tensors, engines, version=1)  # two of them agree now
    assert all(serves(engine, 1, tensors) for engine in engines)
    assert [bucket.close.alive for bucket in buckets] == [True, False, True]


def test_an_engine_that_is_updated_alone_again(buckets: list[Bucket]) -> None:
    """The others keep what they have open until they are closed."""
    engines = [engine_of(1), engine_of(1)]
    update(toy.checkpoint(), engines, version=0)
    tensors = toy.checkpoint(1)
    update(tensors, engines[0], version=1)
    assert serves(engines[0], 1, tensors)
    KEPT.close(engines[0])
    assert [bucket.close.alive for bucket in buckets] == [True]
    KEPT.close(engines)
    assert [bucket.close.alive for bucket in buckets] == [False]


@pytest.mark.parametrize(
    ("engines", "require", "sentence"),
    [
        ([], None, "list of engines is empty"),
        (["http://a:1", "http://b:1", "http://a:1"], None, "http://a:1 comes twice"),
        (["http://a:1"], 2, "require is 2 of 1"),
        (["http://a:1"], 0, "require is 0"),
        (["http://a:1"], True, "require is True"),
        (["http://a:1", 3], None, "int"),
    ],
)
def test_what_is_no_list_of_engines(engines: Any, require: Any, sentence: str) -> None:
    with pytest.raises((EngineError, ManifestError), match=sentence):
        update(toy.checkpoint(), engines, version=0, require=require)


# -- one of them fails


@pytest.mark.guarantee("several-engines", fault="one of two engines cannot begin")
@pytest.mark.parametrize("dead", ["layout", "begin"])
def test_none_is_written_where_one_cannot_begin(dead: str) -> None:
    engines, tensors = [engine_of(2), dead_engine()], toy.checkpoint()
    update(tensors, engines, version=0)
    KEPT.connection_to(engines[1]).forget()
    engines[1].dead = (dead,)  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match="engine 1: cannot be reached"):
        update(toy.checkpoint(1), engines, version=1)
    assert all(serves(engine, 0, tensors) for engine in engines)
    engines[1].dead = ()  # type: ignore[attr-defined]
    tensors = toy.checkpoint(1)
    update(tensors, engines, version=1)
    assert all(serves(engine, 1, tensors) for engine in engines)


@pytest.mark.guarantee("several-engines", fault="a rank fails before the vote")
def test_none_commits_where_one_cannot_vote() -> None:
    engines, tensors = [engine_of(2), failing_engine()], toy.checkpoint()
    with pytest.raises(EngineError, match="engine 1: "):
        update(tensors, engines, version=0)
    assert states(*engines) == [State.QUARANTINED] * 2
    update(tensors, engines[0], version=1)  # the way back
    assert serves(engines[0], 1, tensors)


@pytest.mark.parametrize("stream", [False, True])
def test_the_others_go_on_where_they_may(stream: bool) -> None:
    engines, tensors = [failing_engine(), engine_of(1), engine_of(2)], toy.checkpoint()
    sent: Any = iter(tensors.items()) if stream else tensors
    result = update(sent, engines, version=0, require=2)
    assert list(result.failed) == ["engine 0"]
    assert result.bytes > 0
    assert states(*engines) == [State.QUARANTINED, State.SERVING, State.SERVING]
    assert all(serves(engine, 0, tensors) for engine in engines[1:])
    with pytest.raises(EngineError):  # the control: three are asked for
        update(toy.checkpoint(1), engines, version=1, require=3)
    assert State.SERVING not in states(*engines)


@pytest.mark.guarantee("all-or-none", fault="Ctrl-C while engines begin")
def test_engines_are_told_of_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = engine_of(1), engine_of(1)
    update(toy.checkpoint(0), engines, version=0)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(UpdateSession, "open", interrupted)  # all have begun
        with pytest.raises(KeyboardInterrupt):
            update(toy.checkpoint(1), engines, version=1)
    began = time.monotonic()
    for engine in engines:
        engine.control({"op": "end"})
        assert serves(engine, 0, toy.checkpoint(0))
    assert time.monotonic() - began < 10, "they waited for a trainer that is gone"


@pytest.mark.guarantee("all-or-none", fault="Ctrl-C while an engine commits")
@pytest.mark.parametrize("heard", [False, True])
def test_an_engine_is_told_of_an_interrupt_in_its_commit(
    heard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it stays paused: the traceback of the interrupt keeps its sockets."""
    engine, tensors = engine_of(2), toy.checkpoint()
    real = EngineRanks.ask

    def ask(self: EngineRanks, message: dict[str, Any], *fds: Any) -> list[dict[str, Any]]:
        if message["op"] != "commit":
            return real(self, message, *fds)
        if heard:
            self.send(message)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as held:
        patch.setattr(EngineRanks, "ask", ask)
        update(tensors, engine, version=0)
    assert held.tb
    assert states(engine) == [State.SERVING if heard else State.QUARANTINED]
    assert update(tensors, engine, version=0).bytes == 0  # it has all of it
    assert serves(engine, 0, tensors)


def test_too_few_are_left() -> None:
    engines = [failing_engine(), failing_engine(), engine_of(1)]
    with pytest.raises(EngineError, match="engine 1: "):
        update(toy.checkpoint(), engines, version=0, require=2)
    assert states(*engines) == [State.QUARANTINED] * 3


@pytest.mark.guarantee("several-engines", fault="one of two engines misses the deadline")
def test_an_engine_that_is_too_slow_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had written nothing, and does not serve the version before either."""
    monkeypatch.setattr(participant, "STEP_TIMEOUT_S", 5.0)  # the other has it too
    slow, engine, awake = engine_of(1), engine_of(1), threading.Event()
    memory = slow.ranks[0].memory
    opened = memory.open_bucket

    def hang(*args: Any) -> None:
        time.sleep(7.0)
        awake.set()
        opened(*args)

    monkeypatch.setattr(memory, "open_bucket", hang)
    tensors = toy.checkpoint()
    result = update(tensors, [slow, engine], version=0, require=1)
    assert awake.wait(30)
    assert "took longer" in result.failed["engine 0"]
    assert serves(engine, 0, tensors)
    assert states(slow) == [State.QUARANTINED]


class Walled(FakeEngine):
    """It begins, and its sockets cannot be reached."""

    def _begin(self, message: dict[str, Any]) -> dict[str, Any]:
        begun = super()._begin(message)
        return {**begun, "sockets": ["/nowhere"]} if "sockets" in begun else begun


@pytest.mark.guarantee("several-engines", fault="one of two engines cannot be connected")
def test_an_engine_that_was_never_connected_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the version before; its tokens say so."""
    monkeypatch.setattr(rank_server, "CONNECT_TIMEOUT_S", 4.0)
    engines, tensors = [engine_of(2), engine_of(1)], toy.checkpoint()
    update(tensors, engines, version=0)
    engines[0].__class__ = Walled
    result = update(toy.checkpoint(1), engines, version=1, require=1)
    assert "cannot be reached" in result.failed["engine 0"]
    assert serves(engines[0], 0, tensors)
    assert serves(engines[1], 1, toy.checkpoint(1))
    engines[0].__class__ = FakeEngine
    assert update(toy.checkpoint(1), engines, version=1).failed == {}
    assert all(serves(engine, 1, toy.checkpoint(1)) for engine in engines)


def test_others_do_not_wait_for_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would give the trainer up meanwhile."""
    monkeypatch.setattr(participant, "STEP_TIMEOUT_S", 5.0)
    monkeypatch.setattr(transaction, "DETACH_TIMEOUT_S", 0.1)
    slow, engine, awake = engine_of(1), engine_of(1), threading.Event()
    engine.silence_s = 15.0
    monkeypatch.setattr(slow.ranks[0].memory, "open_bucket", lambda *_: awake.wait(30))
    tensors = toy.checkpoint()
    result = update(tensors, [slow, engine], version=0, require=1)
    assert list(result.failed) == ["engine 0"]
    assert serves(engine, 0, tensors)
    assert states(slow) == [State.UPDATING]
    awake.set()
    slow.control({"op": "end"})
    assert states(slow) == [State.QUARANTINED]


def test_an_engine_of_its_own_layout_fails_at_the_vote() -> None:
    """No engine of its session is left."""
    engines, tensors = [failing_engine(), engine_of(1)], toy.checkpoint()
    engines[0].bucket_bytes = SMALL
    result = update(iter(tensors.items()), engines, version=0, require=1)
    assert (list(result.failed), result.tensors) == (["engine 0"], len(tensors))
    assert states(*engines) == [State.QUARANTINED, State.SERVING]


def cannot_open(*_: Any) -> None:
    raise ValueError("no bucket")


def test_an_engine_that_fails_before_it_is_written_to(
    monkeypatch: pytest.MonkeyPatch, buckets: list[Bucket]
) -> None:
    """It does not go on with the version before; its failure does not free what others read."""
    engines = [engine_of(1), engine_of(1)]
    update(toy.checkpoint(), engines[0], version=0)
    engines[0].ranks[0].memory.close()
    with monkeypatch.context() as patch:
        patch.setattr(engines[0].ranks[0].memory, "open_bucket", cannot_open)
        tensors = toy.checkpoint(1)
        update(tensors, engines, version=1, require=1)
    assert states(engines[0]) == [State.QUARANTINED]
    assert serves(engines[1], 1, tensors)
    assert [bucket.close.alive for bucket in buckets] == [True]
    update(tensors, engines, version=1)
    assert all(serves(engine, 1, tensors) for engine in engines)


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("dead", ["", "layout", "begin", "end"])
@pytest.mark.parametrize("bad", [False, True])
def test_no_cycle_keeps_the_weights(engines: int, dead: str, bad: bool) -> None:
    """They may be gathered for this update, and need the memory of the next step."""

    def updated() -> "weakref.ref[torch.Tensor]":
        tensors = toy.checkpoint()
        norm = tensors["norm.weight"]
        norm[0] = float("nan") if bad else 1.0
        targets = [dead_engine(dead), *(engine_of(1) for _ in range(engines - 1))]
        try:
            update(tensors, targets if engines > 1 else targets[0], version=0)
        except EngineError:
            assert bad or dead
        else:
            assert not bad and not dead
        return weakref.ref(norm)

    logging.disable(logging.CRITICAL)  # pytest keeps what is logged, with its frames
    gc.disable()
    try:
        assert updated()() is None
    finally:
        gc.enable()
        logging.disable(logging.NOTSET)


def test_nan_is_written_to_none() -> None:
    engines, tensors = [engine_of(1), engine_of(1)], toy.checkpoint()
    tensors["norm.weight"][0] = float("nan")
    with pytest.raises(EngineError, match="NaN"):
        update(tensors, engines, version=0)
    assert states(*engines) == [State.QUARANTINED] * 2


# -- the way back of one that was left out


@pytest.fixture
def left_out() -> Iterator[tuple[list[FakeEngine], toy.Tensors]]:
    """Two engines, of which the second missed version 0 because it had not started."""
    engines: list[FakeEngine] = [engine_of(1), dead_engine("layout")]
    tensors = toy.checkpoint()
    assert list(update(tensors, engines, version=0, require=1).failed) == ["engine 1"]
    engines[1].dead = ()  # type: ignore[attr-defined]
    yield engines, tensors


def test_a_late_engine_is_brought_to_the_version_of_the_others(
    left_out: tuple[list[FakeEngine], toy.Tensors],
) -> None:
    engines, tensors = left_out
    before = list(engines[0].ops)
    result = update(tensors, engines, version=0)
    assert (result.failed, result.bytes > 0) == ({}, True)
    assert all(serves(engine, 0, tensors) for engine in engines)
    assert engines[0].ops[len(before) :] == ["begin"]  # which said that it has it
    with pytest.raises(EngineError, match="version 0 is not newer"):  # it is old from now on
        update(tensors, engines, version=0)


def test_an_engine_that_is_still_missing_is_named_again(
    left_out: tuple[list[FakeEngine], toy.Tensors],
) -> None:
    engines, tensors = left_out
    engines[1].dead = ("begin",)  # type: ignore[attr-defined]
    result = update(tensors, engines, version=0, require=1)
    assert (result.bytes, list(result.failed)) == (0, ["engine 1"])
    engines[1].dead = ()  # type: ignore[attr-defined]
    assert update(tensors, engines, version=0).bytes > 0
    assert all(serves(engine, 0, tensors) for engine in engines)


def test_a_late_engine_takes_the_next_version(
    left_out: tuple[list[FakeEngine], toy.Tensors],
) -> None:
    engines, tensors = left_out[0], toy.checkpoint(1)
    update(tensors, engines, version=1)
    assert all(serves(engine, 1, tensors) for engine in engines)


@pytest.mark.guarantee("several-engines", fault="one of two engines does not answer the commit")
def test_an_answer_that_was_lost_after_the_vote() -> None:
    """What was decided stays so, and is asked for again."""
    engines, tensors = [engine_of(2), Cut(engine_of(1).ranks)], toy.checkpoint()
    with pytest.raises(EngineError, match=r"committed on 1 of 2 .* engine 1 .*cut.*same version"):
        update(tensors, engines, version=0)
    assert all(serves(engine, 0, tensors) for engine in engines)
    again = update(tensors, engines, version=0)
    assert (again.version, again.bytes, again.failed) == (0, 0, {})
    with pytest.raises(EngineError, match="version 0 is not newer"):
        update(tensors, engines, version=0)


@pytest.mark.guarantee("several-engines", fault="a connection ends at the vote")
def test_an_engine_that_did_not_hear_of_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It voted, so it has all of it: nothing is sent again."""
    engines, tensors = [engine_of(1), engine_of(2)], toy.checkpoint()
    update(tensors, engines, version=0)
    tensors = toy.checkpoint(1)
    lost = engines[1]
    commit = participant.Participant.commit

    def cut(self: participant.Participant, policy: Any) -> None:
        if self.connection is KEPT.connection_to(lost):
            assert self.ranks is not None
            self.ranks.close()
        commit(self, policy)

    with monkeypatch.context() as patch:
        patch.setattr(participant.Participant, "commit", cut)
        result = update(tensors, engines, version=1, require=1)
    assert list(result.failed) == ["engine 1"]
    assert serves(engines[0], 1, tensors)
    assert states(lost) == [State.QUARANTINED]
    result = update(tensors, engines, version=1)
    assert (result.bytes, result.failed) == (0, {})
    assert all(serves(engine, 1, tensors) for engine in engines)


# -- what a rollout takes for the last update


class Sampled(Dead):
    """It can tell a rollout what it serves."""

    def control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
        reply = super().control(message)
        return reply if message["op"] != "status" else {**reply, "logprobs": {"raw": False}}


@pytest.mark.guarantee("rollouts", fault="an engine that kept the run before, at a higher version")
def test_a_rollout_goes_by_the_last_run() -> None:
    """Versions of different runs have no order."""
    engines = [Sampled(engine_of(1).ranks) for _ in range(2)]
    update(toy.checkpoint(), engines, version=100, run="a")
    engines[1].dead = ("begin",)
    update(toy.checkpoint(1), engines, version=0, run="b", require=1)
    serving, committed = serving_engines(engines, None)
    assert ([each.name for each in serving], committed) == (["engine 0"], Policy("b", 0))
    # within a run the version tells, also where one engine is brought to it late
    engines[1].dead = ()
    update(toy.checkpoint(2), engines[0], version=2, run="b")
    update(toy.checkpoint(1), engines[1], version=1, run="b")
    serving, committed = serving_engines(engines, None)
    assert ([each.name for each in serving], committed) == (["engine 0"], Policy("b", 2))


# -- two trainers


class Locked(FakeEngine):
    """It answers one ``begin`` at a time, as an engine does."""

    def __init__(self) -> None:
        super().__init__(engine_of(1).ranks)
        self._lock = threading.Lock()

    def _begin(self, message: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            return super()._begin(message)


class Trainer:
    """Another process's view of an engine: connections are kept on it."""

    def __init__(self, engine: FakeEngine) -> None:
        self.control = engine.control


@pytest.mark.guarantee("several-engines", fault="two trainers update the same engines at once")
def test_two_trainers_at_once() -> None:
    """None waits for the other, and both engines serve what one of them sent."""
    engines = [Locked(), Locked()]
    update(toy.checkpoint(), engines, version=0, run="before")
    sent = {run: toy.checkpoint(seed) for seed, run in enumerate(("a", "b"), start=1)}
    views = {"a": [Trainer(e) for e in engines], "b": [Trainer(e) for e in engines[::-1]]}

    def train(run: str, version: int, start: threading.Barrier) -> str:
        start.wait(JOIN_S)
        try:
            update(sent[run], views[run], version=version, run=f"{run}{version}")
        except EngineError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        for version in range(6):
            start = threading.Barrier(2)
            futures = [pool.submit(train, run, version, start) for run in sent]
            errors = [future.result(JOIN_S) for future in futures]
            assert all("under way" in error for error in errors if error), errors
            ((state, policy),) = {(w.state, w.policy) for e in engines for w in e.ranks}
            assert state is State.SERVING
            if policy.run != "before":
                assert all(holds(engine, sent[policy.run[0]]) for engine in engines)
