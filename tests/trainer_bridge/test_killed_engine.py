"""The process of an engine is killed while a trainer updates it and another one.

It has two ranks, and no SGLang; tests/engine/test_killed_scheduler.py kills one of SGLang's.
"""

from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.sgl_fp8rl.receiver import toy
from tests.trainer_bridge import ranks
from tests.trainer_bridge.served import left, served
from tests.trainer_bridge.test_update import SMALL, engine_of
from trainer_bridge import update
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.session.participant import Participant
from trainer_bridge.transport.rank_client import RankClients

pytestmark = pytest.mark.timeout(120)

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
    send_chunk, chunks = RankClients.send_chunk, iter(range(100))

    def send_or_kill(self: RankClients, *args: Any) -> None:
        if len(self._sockets) == TP and next(chunks) == 2:
            dying.kill()
        send_chunk(self, *args)

    patch.setattr(RankClients, "send_chunk", send_or_kill)


def after_its_vote(patch: pytest.MonkeyPatch, dying: EngineInAProcess) -> None:
    commit = Participant.commit

    def commit_or_kill(self: Participant, policy: Any) -> None:
        if self.name == dying.address:
            dying.kill()
        commit(self, policy)

    patch.setattr(Participant, "commit", commit_or_kill)


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
