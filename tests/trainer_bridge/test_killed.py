"""A trainer rank, or an engine, is killed in an update: what engines serve then, and the way back.

Trainers are two real processes of one job over gloo. Engines are fake, and behind HTTP;
tests/engine/test_killed_scheduler.py kills one of SGLang's.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.receiver import rank_server
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge import fake_ipc, ranks
from tests.trainer_bridge.calls import before
from tests.trainer_bridge.served import left, served
from tests.trainer_bridge.shards_job import GpuEngine, Trainer
from tests.trainer_bridge.test_placements import distributed
from tests.trainer_bridge.test_update import SMALL, engine_of
from trainer_bridge import update
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.ranks import collective
from trainer_bridge.ranks.collective import Leader
from trainer_bridge.session import transaction
from trainer_bridge.session.participant import Participant
from trainer_bridge.session.transaction import Transaction
from trainer_bridge.session.update_session import UpdateSession
from trainer_bridge.shards.codes_memory import CodesMemory
from trainer_bridge.sources.parameters import Source
from trainer_bridge.transport.rank_client import RankClients
from trainer_bridge.updates import weights

pytestmark = pytest.mark.timeout(180)

WORLD = 2
COLLECTIVE_TIMEOUT_S = 30
SILENCE_S, GIVE_UP_S, CONNECT_S = 15.0, 5.0, 10.0
"""In the place of 300 s that engines hear nothing, of an hour that a rank waits for the other one,
and of 30 s that engines wait for a connection."""
PRESENCE_S = 3.0
"""In the place of 60 s."""
AFTER = 9
"""The version after the fault."""
Die = Callable[[pytest.MonkeyPatch], None]


class Watched(FakeEngine):
    """It notes what it serves when the update after the fault begins."""

    before = ""

    def _begin(self, message: dict[str, Any]) -> dict[str, Any]:
        is_over = message["version"] == AFTER
        self.before = left(self) if is_over else ""
        self.silence_s = 30.0 if is_over else SILENCE_S
        return super()._begin(message)


def die_at(owner: Any, name: str, patch: pytest.MonkeyPatch) -> None:
    """As it calls that."""
    patch.setattr(owner, name, ranks.die)


def at(owner: Any, name: str) -> Die:
    return partial(die_at, owner, name)


when_none_is_connected = at(RankClients, "__init__")


def when_one_is_connected(patch: pytest.MonkeyPatch) -> None:
    connected: list[Participant] = []

    def die_at_the_second(self: Participant, *_: Any) -> None:
        if connected:
            when_none_is_connected(patch)
        connected.append(self)

    before(patch, Participant, "begin", die_at_the_second)


def between_two_commits(patch: pytest.MonkeyPatch) -> None:
    commit = Participant.commit

    def commit_and_die(self: Participant, policy: Policy) -> None:
        commit(self, policy)
        ranks.die()

    patch.setattr(Participant, "commit", commit_and_die)


def while_all_gather(patch: pytest.MonkeyPatch) -> None:
    read = iter(range(4))
    before(patch, Source, "read", lambda *_: next(read, None) is None and ranks.die())


def killed(rank: int, folder: Path, engines: list[str], lost: int, die: Die, error: str) -> None:
    logging.disable(logging.CRITICAL)
    mesh = init_device_mesh("cpu", (WORLD,))
    named = [distributed(toy.checkpoint(version), mesh, (Shard(0),)) for version in (0, 1)]
    update(named[0], engines, version=0, run="killed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective, "WAIT_S", GIVE_UP_S)
        if rank == lost:
            # one after the other, so that it is known which of them were told
            patch.setattr(transaction, "call_all", lambda calls: [call() for _, call in calls])
            die(patch)
        with pytest.raises((EngineError, TimeoutError, RuntimeError), match=error):
            update(named[1], engines, version=1, run="killed")
    assert rank != lost
    if rank == 0:  # alone, with all of the weights
        update(toy.checkpoint(AFTER), engines, version=AFTER, run="killed")


NO_LEADER, NO_FOLLOWER = "the first rank sent nothing", "another rank did not call it"


@pytest.mark.guarantee("several-engines", fault="the first of two trainer ranks is killed")
@pytest.mark.guarantee("several-engines", fault="the second of two trainer ranks is killed")
@pytest.mark.parametrize(
    ("lost", "die", "error", "found"),
    [
        pytest.param(0, when_none_is_connected, NO_LEADER, "0 0", id="none is connected"),
        pytest.param(0, when_one_is_connected, NO_LEADER, "quarantined 0", id="one is connected"),
        pytest.param(
            0, at(UpdateSession, "finish"), NO_LEADER, "quarantined quarantined", id="before a vote"
        ),
        pytest.param(
            0, at(Transaction, "commit"), NO_LEADER, "quarantined quarantined", id="after the vote"
        ),
        pytest.param(0, between_two_commits, NO_LEADER, "1 quarantined", id="between two commits"),
        pytest.param(1, at(Leader, "each"), NO_FOLLOWER, "0 0", id="before it asks"),
        pytest.param(1, at(Source, "read"), "", "0 0", id="when engines have begun"),
        pytest.param(1, while_all_gather, "", "quarantined quarantined", id="while all gather"),
    ],
)
def test_a_rank_is_killed(
    lost: int, die: Die, error: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody serves what was not committed, the other rank hears of it and ends the update, and the
    next one heals all: that of the first rank alone, or of the next trainer. If ranks took a lost
    trainer for a commit, ``found`` would differ; were the bucket sent with what it happens to hold,
    the engines would serve rows of the version before."""
    if lost == 0:
        monkeypatch.setattr(rank_server, "CONNECT_TIMEOUT_S", CONNECT_S)
    engines = [Watched(engine_of(tp, SMALL).ranks, SMALL) for tp in (1, 2)]
    with served(engines) as addresses:
        worker = partial(killed, engines=addresses, lost=lost, die=die, error=error)
        ranks.run_and_lose(worker, tmp_path, WORLD, COLLECTIVE_TIMEOUT_S, lost=lost)
        if lost == 0:
            for engine in engines:
                engine.control({"op": "end"})
            update(toy.checkpoint(AFTER), addresses, version=AFTER, run="the next one")
    assert " ".join(engine.before for engine in engines) == found
    assert [left(engine) for engine in engines] == [f"{AFTER}"] * 2


def while_engines_read_its_shards(patch: pytest.MonkeyPatch) -> None:
    """Before it is asked whether it is still there."""
    left_to_hear = iter([1, 0])
    before(patch, Leader, "share", lambda *_: next(left_to_hear) or ranks.die())


def killed_beside_its_shards(rank: int, folder: Path, engines: list[str], die: Die) -> None:
    logging.disable(logging.CRITICAL)
    with pytest.MonkeyPatch.context() as patch:
        memories, _ = fake_ipc.install(patch)
        trainer = Trainer(memories, rank)
        for version in range(3):
            update(trainer.become(toy.checkpoint(version)), engines, version=version)
        # the package's ``update`` is the function
        patch.setattr(import_module("trainer_bridge.updates.update"), "PRESENCE_S", PRESENCE_S)
        patch.setattr(weights, "CODES_S", PRESENCE_S)
        if rank == 1:
            die(patch)
        with pytest.raises(TimeoutError, match="another rank did not call it"):
            update(trainer.become(toy.checkpoint(3)), engines, version=3)
        assert rank == 0
        update(toy.checkpoint(AFTER), engines, version=AFTER)


class WatchedGpu(Watched, GpuEngine):
    """On GPUs."""


@pytest.mark.guarantee("several-engines", fault="a trainer rank whose shards are read is killed")
@pytest.mark.parametrize(
    ("die", "found"),
    [(while_engines_read_its_shards, "quarantined"), (at(CodesMemory, "bad"), "2")],
)
def test_a_rank_is_killed_whose_shards_are_read(
    die: Die, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory may be anything by then. If the first one did not ask, both would commit."""
    _, interpreter = fake_ipc.install(monkeypatch)
    engines = [WatchedGpu(interpreter.writable) for _ in range(2)]
    with served(engines) as addresses:
        worker = partial(killed_beside_its_shards, engines=addresses, die=die)
        ranks.run_and_lose(worker, tmp_path, WORLD, COLLECTIVE_TIMEOUT_S, lost=1)
    assert [engine.before for engine in engines] == [found] * 2
    assert [left(engine) for engine in engines] == [f"{AFTER}"] * 2


TP = 2
START_S = 60.0


def serve(connection: Connection) -> None:
    engine = engine_of(TP, SMALL)
    with served([engine]) as (address,):
        connection.send(address)
        while connection.recv():
            connection.send(left(engine))


class EngineInAProcess:
    """An engine that can be killed."""

    def __enter__(self) -> "EngineInAProcess":
        context = ranks.forkserver()
        self._connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other,), daemon=True)
        self._process.start()
        other.close()
        assert self._connection.poll(START_S), "the engine does not start"
        self.address: str = self._connection.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._connection.close()

    def left(self) -> str:
        self._connection.send(True)
        found: str = self._connection.recv()
        return found

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def while_it_is_written(patch: pytest.MonkeyPatch, dying: EngineInAProcess) -> None:
    chunks = iter(range(100))

    def kill(self: RankClients, *_: Any) -> None:
        if len(self._sockets) == TP and next(chunks) == 2:
            dying.kill()

    before(patch, RankClients, "send_chunk", kill)


def after_its_vote(patch: pytest.MonkeyPatch, dying: EngineInAProcess) -> None:

    def kill(self: Participant, policy: Policy) -> None:
        if self.name == dying.address:
            dying.kill()

    before(patch, Participant, "commit", kill)


@pytest.mark.guarantee("several-engines", fault="the process of one of two engines is killed")
@pytest.mark.parametrize(
    ("when", "require", "found"),
    [
        (while_it_is_written, None, "quarantined"),
        (while_it_is_written, 1, "1"),
        (after_its_vote, None, "1"),
        (after_its_vote, 1, "1"),
    ],
)
def test_an_engine_is_killed(when: Any, require: int | None, found: str) -> None:
    """The other one waits for nothing of it. Where it must, the update raises and names it; one
    that takes its place is brought to the version, which is not sent to the other one again."""
    survivor = engine_of(1, SMALL)
    with ExitStack() as stack:
        dying = stack.enter_context(EngineInAProcess())
        engines = [survivor, dying.address]
        update(toy.checkpoint(0), engines, version=0)
        assert (left(survivor), dying.left()) == ("0", "0")
        with pytest.MonkeyPatch.context() as patch:
            when(patch, dying)
            if require is None:
                with pytest.raises(EngineError, match=dying.address):
                    update(toy.checkpoint(1), engines, version=1)
            else:
                result = update(toy.checkpoint(1), engines, version=1, require=require)
                assert list(result.failed) == [dying.address]
        assert left(survivor) == found
        if found == "quarantined":
            update(toy.checkpoint(1), survivor, version=1)  # an update of those that live
            assert left(survivor) == "1"
            return
        late = stack.enter_context(EngineInAProcess())
        sent = len(survivor.ops)
        assert update(toy.checkpoint(1), [survivor, late.address], version=1).failed == {}
        assert survivor.ops[sent:] == ["begin"]
        assert (left(survivor), late.left()) == ("1", "1")
