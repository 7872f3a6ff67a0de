"""One update of several engines: real transport, sockets and sessions, fake schedulers.

A second try at an update that not every engine has brings the same weights, or nothing.
"""

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver import rank_server
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge.calls import before
from tests.trainer_bridge.served import left
from tests.trainer_bridge.test_fsdp import failure, run, toy_trainer
from tests.trainer_bridge.test_update import SMALL, engine_of, holds
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.rollouts.serving_engines import serving_engines
from trainer_bridge.session import participant, transaction
from trainer_bridge.session.kept import KEPT
from trainer_bridge.session.update_session import UpdateSession
from trainer_bridge.transport.rank_client import EngineRanks
from trainer_bridge.updates import weights
from trainer_bridge.updates.update import RUN, update
from trainer_bridge.updates.weights import WholeModel, weights_digest
from trainer_bridge.ways.carriers import Bucket

pytestmark = pytest.mark.timeout(120)

JOIN_S = 60.0


def serves(engine: FakeEngine, version: int, tensors: toy.Tensors) -> bool:
    known = {(w.state, w.policy.run, w.policy.version) for w in engine.ranks}
    return known == {(State.SERVING, RUN, version)} and holds(engine, tensors)


def states(*engines: FakeEngine) -> list[State]:
    """The one state of each engine's ranks."""
    assert all(len({w.state for w in engine.ranks}) == 1 for engine in engines)
    return [engine.ranks[0].state for engine in engines]


def late_engine() -> FakeEngine:
    """One that has not started."""
    engine = engine_of(1)
    engine.dead = ("begin",)
    return engine


class FailingRank(EngineWeights):
    """A rank whose addresses change; it learns at ``finish``, when everything was written."""

    def check_addresses(self) -> None:
        raise RuntimeError("a rank ran out of luck")


def failing_engine() -> FakeEngine:
    engine = engine_of(2)
    engine.ranks[1].__class__ = FailingRank
    return engine


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


class Fault(NamedTuple):
    """What befalls the second of two engines in an update to version 1."""

    plant: Callable[[pytest.MonkeyPatch, FakeEngine], None]
    why: str
    both: str = "quarantined quarantined"
    """What the two serve where the update needs both."""
    one: str = "1 quarantined"
    """What they serve where it needs one."""
    nbytes: bool = True
    """Whether the second try sends anything."""


def cannot_be_told(op: str) -> Callable[[pytest.MonkeyPatch, FakeEngine], None]:
    def plant(patch: pytest.MonkeyPatch, engine: FakeEngine) -> None:
        KEPT.connection_to(engine).forget()
        patch.setattr(engine, "dead", (op,))

    return plant


def has_no_bucket(patch: pytest.MonkeyPatch, engine: FakeEngine) -> None:
    """As it fails before anything is written; it does not go on with the version before."""
    engine.ranks[0].memory.close()
    cannot_open = Mock(side_effect=ValueError("no bucket"))
    patch.setattr(engine.ranks[0].memory, "open_bucket", cannot_open)


def fails_at_the_vote(patch: pytest.MonkeyPatch, engine: FakeEngine) -> None:
    patch.setattr(engine.ranks[0], "__class__", FailingRank)


def has_its_own_layout(patch: pytest.MonkeyPatch, engine: FakeEngine) -> None:
    """No engine of its session is left when it fails."""
    engine.bucket_bytes = SMALL
    KEPT.connection_to(engine).forget()
    fails_at_the_vote(patch, engine)


def has_sockets_elsewhere(patch: pytest.MonkeyPatch, engine: FakeEngine) -> None:
    begin = engine._begin

    def walled(message: dict[str, Any]) -> dict[str, Any]:
        begun = begin(message)
        return {**begun, "sockets": ["/nowhere"]} if "sockets" in begun else begun

    patch.setattr(rank_server, "CONNECT_TIMEOUT_S", 4.0)
    patch.setattr(engine, "_begin", walled)


def is_too_slow(patch: pytest.MonkeyPatch, engine: FakeEngine) -> None:
    memory = engine.ranks[0].memory
    opened = memory.open_bucket
    memory.close()
    patch.setattr(memory, "open_bucket", lambda *args: time.sleep(7.0) or opened(*args))
    patch.setattr(participant, "STEP_TIMEOUT_S", 5.0)  # the other has it too


def does_not_hear_of_the_commit(patch: pytest.MonkeyPatch, engine: FakeEngine) -> None:
    """It voted, so it has all of it: nothing is sent again."""

    def cut(self: participant.Participant, policy: Any) -> None:
        if self.connection is KEPT.connection_to(engine):
            assert self.ranks is not None
            self.ranks.close()

    before(patch, participant.Participant, "commit", cut)


def loses_its_answer(patch: pytest.MonkeyPatch, engine: FakeEngine) -> None:
    """What was decided stays so, and is asked for again."""
    engine.lost = ["end"]


FAULTS = {
    "layout": Fault(cannot_be_told("layout"), "cannot be reached", "0 0", "1 0"),
    "begin": Fault(cannot_be_told("begin"), "cannot be reached", "0 0", "1 0"),
    "sockets": Fault(has_sockets_elsewhere, "cannot be reached", "0 0", "1 0"),
    "bucket": Fault(has_no_bucket, "no bucket", "0 quarantined"),
    "slow": Fault(is_too_slow, "took longer"),
    "vote": Fault(fails_at_the_vote, "ran out of luck"),
    "own layout": Fault(has_its_own_layout, "ran out of luck"),
    "commit": Fault(
        does_not_hear_of_the_commit, "committed on 1 of 2", "1 quarantined", nbytes=False
    ),
    "answer": Fault(loses_its_answer, r"committed on 1 of 2 .*cut", "1 1", "1 1", nbytes=False),
}
CASES = [
    (name, require, stream)
    for name in FAULTS
    for require in (None, 1)
    for stream in (False, True)
    if name not in ("sockets", "slow") or (require and not stream)  # they take seconds
]


@pytest.mark.guarantee("several-engines", fault="one of two engines cannot begin")
@pytest.mark.guarantee("several-engines", fault="one of two engines cannot be connected")
@pytest.mark.guarantee("several-engines", fault="one of two engines misses the deadline")
@pytest.mark.guarantee("several-engines", fault="a rank fails before the vote")
@pytest.mark.guarantee("several-engines", fault="a connection ends at the vote")
@pytest.mark.guarantee("several-engines", fault="one of two engines does not answer the commit")
@pytest.mark.parametrize(("name", "require", "stream"), CASES)
def test_one_of_two_engines_fails(
    name: str, require: int | None, stream: bool, buckets: list[Bucket]
) -> None:
    """All serve one version, or say that they serve none; the next try brings all to this one."""
    fault, engines = FAULTS[name], [engine_of(2), engine_of(1)]
    update(toy.checkpoint(0), engines, version=0)
    tensors = toy.checkpoint(1)
    sent: Any = iter(tensors.items()) if stream else tensors
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(patch, engines[1])
        if require is None:
            with pytest.raises(EngineError, match=f"(?=.*engine 1\\b).*{fault.why}"):
                update(sent, engines, version=1)
        else:
            result = update(sent, engines, version=1, require=require)
            assert list(result.failed) == ["engine 1"]
            assert result.bytes > 0 and result.tensors == len(tensors)
        engines[1].control({"op": "end"})
    found = fault.both if require is None else fault.one
    assert " ".join(map(left, engines)) == found
    before = len(engines[0].ops)
    again = update(tensors, engines, version=1)
    assert (again.failed, [left(engine) for engine in engines]) == ({}, ["1", "1"])
    assert (again.bytes > 0) == fault.nbytes
    if found.startswith("1 "):
        assert engines[0].ops[before:] == ["begin"], "which said that it has it"
    with pytest.raises(EngineError, match="version 1 is not newer"):  # it is old from now on
        update(tensors, engines, version=1)
    assert [bucket.close.alive for bucket in buckets].count(True) <= 2


def test_the_others_go_on_where_enough_are_left() -> None:
    """The controls: more are asked for than there are."""
    engines, tensors = [failing_engine(), engine_of(1), engine_of(2)], toy.checkpoint()
    result = update(tensors, engines, version=0, require=2)
    assert list(result.failed) == ["engine 0"]
    assert states(*engines) == [State.QUARANTINED, State.SERVING, State.SERVING]
    assert all(serves(engine, 0, tensors) for engine in engines[1:])
    with pytest.raises(EngineError, match="engine 0: "):
        update(toy.checkpoint(1), engines, version=1, require=3)
    assert states(*engines) == [State.QUARANTINED] * 3
    engines[1] = failing_engine()
    with pytest.raises(EngineError, match="engine 1: "):
        update(tensors, engines, version=2, require=2)
    assert states(*engines) == [State.QUARANTINED] * 3


@pytest.mark.guarantee("all-or-none", fault="Ctrl-C while engines begin")
def test_engines_are_told_of_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = engine_of(1), engine_of(1)
    update(toy.checkpoint(0), engines, version=0)
    with monkeypatch.context() as patch:
        # all have begun
        patch.setattr(UpdateSession, "open", Mock(side_effect=KeyboardInterrupt))
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


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("dead", ["", "layout", "begin", "end"])
@pytest.mark.parametrize("bad", [False, True])
def test_no_cycle_keeps_the_weights(engines: int, dead: str, bad: bool) -> None:
    """They may be gathered for this update, and need the memory of the next step."""

    def updated() -> "weakref.ref[torch.Tensor]":
        tensors = toy.checkpoint()
        norm = tensors["norm.weight"]
        norm[0] = float("nan") if bad else 1.0
        targets = [engine_of(1) for _ in range(engines)]
        targets[0].dead = (dead,)
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


def test_an_engine_that_was_left_out() -> None:
    """It is named as long as it is missing, and takes the next version too."""
    engines, tensors = [engine_of(1), late_engine()], toy.checkpoint()
    for is_first in (True, False):
        result = update(tensors, engines, version=0, require=1)
        assert (result.bytes > 0, list(result.failed)) == (is_first, ["engine 1"])
    engines[1].dead = ()
    tensors = toy.checkpoint(1)
    update(tensors, engines, version=1)
    assert all(serves(engine, 1, tensors) for engine in engines)


# -- what a rollout takes for the last update


@pytest.mark.guarantee("rollouts", fault="an engine that kept the run before, at a higher version")
def test_a_rollout_goes_by_the_last_run() -> None:
    """Versions of different runs have no order."""
    engines = [engine_of(1) for _ in range(2)]
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


class Trainer:
    """Another process's view of an engine: connections are kept on it."""

    def __init__(self, engine: FakeEngine) -> None:
        self.control = engine.control


def one_at_a_time(begin: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """As an engine answers."""
    lock = threading.Lock()

    def locked(message: Any) -> Any:
        with lock:
            return begin(message)

    return locked


@pytest.mark.guarantee("several-engines", fault="two trainers update the same engines at once")
def test_two_trainers_at_once() -> None:
    """None waits for the other, and both engines serve what one of them sent."""
    engines = [engine_of(1), engine_of(1)]
    for engine in engines:
        engine._begin = one_at_a_time(engine._begin)  # type: ignore[method-assign]
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


# -- a second try


Late = tuple[FakeEngine, FakeEngine, toy.Tensors]


@pytest.fixture
def late() -> Late:
    """An engine that has version 0, and one that had not started."""
    engine, other, tensors = engine_of(1), late_engine(), toy.checkpoint()
    assert list(update(tensors, [engine, other], version=0, require=1).failed) == ["engine 1"]
    other.dead = ()
    return engine, other, tensors


@pytest.mark.guarantee("several-engines", fault="a second try brings other weights")
@pytest.mark.parametrize("alone", [False, True])
def test_other_weights_are_refused(late: Late, alone: bool) -> None:
    """Else two contents of one version would be served."""
    engine, other, tensors = late
    engines, changed = other if alone else [engine, other], toy.checkpoint()
    with torch.no_grad():
        changed["norm.weight"][3] += 0.5
    before = states(other)
    with pytest.raises(ManifestError, match="have changed since an earlier try"):
        update(changed, engines, version=0)
    assert serves(engine, 0, tensors)
    assert states(other) == before
    # the ways back: the same weights, or a newer version
    update(tensors, engines, version=0)
    assert serves(other, 0, tensors)
    update(changed, [engine, other], version=1)
    assert all(serves(each, 1, changed) for each in (engine, other))


@pytest.mark.guarantee(
    "runs", fault="the connection is cut after the commit, and the trainer tries again"
)
@pytest.mark.guarantee("runs", fault="the answer to a commit is lost, and the weights change")
@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("others", [0, 1])
def test_a_commit_whose_answer_was_lost(others: int, is_restarted: bool) -> None:
    """Nothing is to be sent, and the engines would go on with what they have; or the one whose
    answer is lost starts anew then, with nothing."""
    lost, rest, tensors = engine_of(2), [engine_of(1)] * others, toy.checkpoint()
    engines, other = [*rest, lost] if rest else lost, toy.checkpoint(1)
    lost.lost = ["end"]
    with pytest.raises(EngineError, match="cut"):
        update(tensors, engines, version=0)
    if is_restarted:
        lost.ranks = engine_of(2).ranks
    if rest or not is_restarted:
        with pytest.raises(ManifestError, match="have changed since an earlier try"):
            update(other, engines, version=0)
    held = rest if is_restarted else [*rest, lost]
    assert all(serves(each, 0, tensors) for each in held)
    again = update(tensors, engines, version=0)
    assert (again.run, again.version, again.bytes > 0) == (RUN, 0, is_restarted)
    assert all(serves(each, 0, tensors) for each in [*rest, lost])
    # the control: a version whose commit was answered is old
    with pytest.raises(EngineError, match="version 0 is not newer"):
        update(tensors, engines, version=0)
    update(other, engines, version=1)
    assert all(serves(each, 1, other) for each in [*rest, lost])


def test_the_order_of_names_does_not_count(late: Late) -> None:
    engine, other, tensors = late
    update(dict(reversed(tensors.items())), [engine, other], version=0)
    assert all(serves(each, 0, tensors) for each in (engine, other))


def test_weights_that_cannot_be_read_again_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The update committed, so it must not raise."""
    engines, tensors = [engine_of(1), late_engine()], toy.checkpoint()
    with monkeypatch.context() as patch:
        patch.setattr(weights, "weights_digest", lambda named: 1 / 0)
        assert list(update(tensors, engines, version=0, require=1).failed) == ["engine 1"]
    engines[1].dead = ()
    update(toy.checkpoint(1), engines, version=0)
    assert serves(engines[1], 0, toy.checkpoint(1))


def test_kv_scales_count() -> None:
    def digest(scales: torch.Tensor | None) -> str:
        model = WholeModel(toy.checkpoint())
        if scales is not None:
            model.add(KV_SCALES, scales)
        return model.digest()

    scales = torch.ones(2, 2, 4)
    assert digest(scales) == digest(scales.clone()) != digest(2 * scales)
    assert digest(None) not in ("", digest(scales))


def changes_on_one_rank(rank: int, folder: Path) -> None:
    engines = [engine_of(1), late_engine()] if rank == 0 else None
    tensors = toy.checkpoint()
    model = toy_trainer(tensors)
    update(model, engines, version=0, require=1 if rank == 0 else None)
    if engines is not None:
        engines[1].dead = ()
    parameter = model.get_parameter("attn.q.weight")
    assert isinstance(parameter, DTensor)
    local = parameter.to_local().detach()
    if rank == 1:
        local[-1, -1] += 1.0
    assert "have changed" in failure(lambda: update(model, engines, version=0))[1]
    if rank == 1:
        local[-1, -1] = tensors["attn.q.weight"][-1, -1]
    update(model, engines, version=0)
    assert engines is None or all(serves(each, 0, tensors) for each in engines)


def test_shards_that_changed_on_one_rank_are_refused(tmp_path: Path) -> None:
    run(changes_on_one_rank, tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", [1, 3, 8, 1025])
@pytest.mark.parametrize("offset", [0, 1])
def test_each_element_counts(dtype: torch.dtype, size: int, offset: int) -> None:
    """The last one too, in tensors and views whose size is not a multiple of a word."""
    tensor = torch.ones(size + offset, dtype=dtype)[offset:]
    digest = partial(weights_digest, [("w", tensor)])
    first = digest()
    for place in {0, size // 2, size - 1}:
        tensor[place] = 2.0
        assert digest() != first
        tensor[place] = 1.0
        assert digest() == first


def test_names_types_and_shapes_count() -> None:
    zeros = torch.zeros(4, 2)
    others = [
        [("v", zeros)],
        [("w", zeros.half())],
        [("w", zeros.view(2, 4))],
        [("w", zeros), ("v", zeros)],
        [],
    ]
    digests = {weights_digest(named) for named in ([("w", zeros)], *others)}
    assert len(digests) == len(others) + 1
    assert weights_digest([("w", zeros.t())]) == weights_digest([("w", torch.zeros(2, 4))])
