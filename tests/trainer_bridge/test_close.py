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


def test_the_engine_keeps_what_a_living_trainer_shares() -> None:
    engine = engine_of(2)
    for version in range(2):
        update(toy.checkpoint(version), engine, version=version)
        look(engine)
        assert opened(engine) == [1, 1]
    assert "unknown" not in engine.ops


def test_a_trainer_that_died_leaves_nothing_open() -> None:
    """The kernel closes its sockets; nothing else tells the engine."""
    engine = engine_of(2)
    update(toy.checkpoint(), engine, version=0)
    connection = KEPT.connection_to(engine)
    assert connection._ranks is not None
    connection._ranks.close()
    look(engine)
    assert opened(engine) == [0, 0]
    assert holds(engine, toy.checkpoint())
    update(toy.checkpoint(1), engine, version=1)  # as a new trainer would
    assert holds(engine, toy.checkpoint(1))
    assert opened(engine) == [1, 1]


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


def test_close_returns_when_every_rank_has_let_go() -> None:
    engine = engine_of(2)
    update(toy.checkpoint(), engine, version=0)
    sender = KEPT.connection_to(engine).sender
    assert sender is not None and sender._bucket is not None
    is_open = sender._bucket.close
    assert is_open.alive
    with looping(engine):
        trainer_bridge.close(engine)
        assert opened(engine) == [0, 0]
    assert not is_open.alive
    update(toy.checkpoint(1), engine, version=1)
    assert holds(engine, toy.checkpoint(1))


def test_a_rank_that_is_busy_does_not_hold_the_trainer() -> None:
    engine = engine_of(2)
    update(toy.checkpoint(), engine, version=0)
    KEPT.connection_to(engine).close(timeout_s=0.2)  # no rank looks
    assert opened(engine) == [1, 1]
    look(engine)
    assert opened(engine) == [0, 0]


def test_ranks_that_are_gone_are_not_waited_for(tmp_path: Path) -> None:
    rank = Rank(tmp_path, hang_up("commit"))
    connected = RankClients([rank.path], TOKEN)
    connected.send({"op": "commit"})
    rank.join()
    began = time.monotonic()
    connected.detach(timeout_s=20.0)
    assert time.monotonic() - began < 10.0


def test_closed_connections_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FP8RL_KEY", raising=False)
    other, closed = KEPT.connection_to("http://a:1"), []
    for key in ("first", "second"):
        monkeypatch.setenv("FP8RL_KEY", key)
        closed.append(KEPT.connection_to("http://b:1"))
    trainer_bridge.close("http://b:1")
    assert KEPT.connection_to("http://b:1") not in closed
    monkeypatch.delenv("FP8RL_KEY")
    assert KEPT.connection_to("http://a:1") is other


@pytest.mark.parametrize("engine", ["http://nobody:1", None, object()])
def test_what_was_never_updated_can_be_closed(engine: Any) -> None:
    trainer_bridge.close(engine)
    assert not KEPT._by_address and not KEPT._of_objects


def test_at_exit_every_engine_lets_go() -> None:
    engines = [engine_of(1), engine_of(1)]
    update(toy.checkpoint(), engines, version=0)
    with looping(engines[0]), looping(engines[1]):
        KEPT.close_all(timeout_s=60.0)
        assert [opened(engine) for engine in engines] == [[0], [0]]


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
