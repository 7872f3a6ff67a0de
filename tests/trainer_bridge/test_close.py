"""The end of a trainer, or of its connection: the engine lets go of its memory."""

import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import trainer_bridge
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge.fake_rank import TOKEN, Rank, hang_up
from tests.trainer_bridge.test_update import engine_of, holds
from trainer_bridge.session.kept import KEPT
from trainer_bridge.transport.rank_client import RankClients
from trainer_bridge.updates.update import update

pytestmark = pytest.mark.timeout(120)


def look(engine: FakeEngine) -> None:
    """Its ranks look after their trainer, as they do between two steps."""
    for weights in engine.ranks:
        weights.memory.close_if_orphaned()


@contextmanager
def looping(engine: FakeEngine) -> Iterator[None]:
    done = threading.Event()

    def loop() -> None:
        while not done.wait(0.01):
            look(engine)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    yield
    done.set()
    thread.join()


def opened(engine: FakeEngine) -> list[int]:
    """How much of a trainer's memory each rank has open."""
    return [len(weights.memory.known()) for weights in engine.ranks]


def test_what_is_pickled_of_close_closes_what_this_process_keeps() -> None:
    """As where a Ray task, or a process that is spawned, refers to it."""
    assert pickle.loads(pickle.dumps(trainer_bridge.close)) is trainer_bridge.close


def test_an_engine_keeps_what_a_living_trainer_shares() -> None:
    """The kernel closes the sockets of one that died; nothing else tells the engine. A rank that is
    busy does not hold one that closes."""
    engine = engine_of(2)
    for version in range(2):
        update(toy.checkpoint(version), engine, version=version)
        look(engine)
        assert opened(engine) == [1, 1]
    assert "unknown" not in engine.ops
    connection = KEPT.connection_to(engine)
    assert connection._ranks is not None
    connection._ranks.close()
    look(engine)
    assert opened(engine) == [0, 0]
    assert holds(engine, toy.checkpoint(1))
    update(toy.checkpoint(2), engine, version=2)  # as a new trainer would
    assert holds(engine, toy.checkpoint(2))
    assert opened(engine) == [1, 1]
    KEPT.connection_to(engine).close(timeout_s=0.2)  # no rank looks
    assert opened(engine) == [1, 1]
    look(engine)
    assert opened(engine) == [0, 0]


def test_the_trainer_of_the_last_update_is_the_one_that_counts() -> None:
    engine = engine_of(1)
    update(toy.checkpoint(), engine, version=0)
    first = KEPT.connection_to(engine)
    del KEPT._of_objects[id(engine)]  # as in another process
    update(toy.checkpoint(1), engine, version=1)
    with looping(engine):
        first.close()
        assert opened(engine) == [1]
        trainer_bridge.close(engine)
    assert opened(engine) == [0]


@pytest.mark.parametrize("at_exit", [False, True])
def test_close_returns_when_every_rank_has_let_go(at_exit: bool) -> None:
    engines = [engine_of(2), engine_of(1)]
    update(toy.checkpoint(), engines, version=0)
    sender = KEPT.connection_to(engines[0]).sender
    assert sender is not None and sender._bucket is not None
    is_open = sender._bucket.close
    assert is_open.alive
    with looping(engines[0]), looping(engines[1]):
        if at_exit:
            KEPT.close_all(timeout_s=60.0)
        else:
            trainer_bridge.close(engines)
        assert [opened(engine) for engine in engines] == [[0, 0], [0]]
    assert not is_open.alive
    update(toy.checkpoint(1), engines, version=1)
    assert all(holds(engine, toy.checkpoint(1)) for engine in engines)


def test_ranks_that_are_gone_are_not_waited_for(tmp_path: Path) -> None:
    rank = Rank(tmp_path, hang_up("commit"))
    connected = RankClients([rank.path], TOKEN)
    connected.send({"op": "commit"})
    rank.join()
    began = time.monotonic()
    connected.detach(timeout_s=20.0)
    assert time.monotonic() - began < 10.0


@pytest.mark.parametrize("engine", ["http://nobody:1", None, object()])
def test_what_was_never_updated_can_be_closed(engine: Any) -> None:
    trainer_bridge.close(engine)
    assert not KEPT._by_address and not KEPT._of_objects


def test_at_exit_no_engine_waits_for_a_busy_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """They let go while the busy one is waited for."""
    busy, *engines = (engine_of(1) for _ in range(3))
    update(toy.checkpoint(), [busy, *engines], version=0)
    let_go = threading.Event()

    class Waited:
        """In the place of the busy engine's ranks: the others have let go before it answers."""

        def hang_up(self) -> None:
            pass

        def detach(self, timeout_s: float) -> None:
            for engine in engines:
                look(engine)
            if [opened(engine) for engine in engines] == [[0], [0]]:
                let_go.set()

        close = hang_up

    monkeypatch.setattr(KEPT.connection_to(busy), "_ranks", Waited())
    KEPT.close_all()
    assert let_go.is_set()
