"""What a trainer keeps of an engine between updates, and when both let go of memory."""

import gc
import pickle
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import trainer_bridge
from sgl_fp8rl.protocol.policy import Policy
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge.fake_rank import TOKEN, Rank, hang_up
from tests.trainer_bridge.test_sender import BUCKET_BYTES, GPU, layout
from tests.trainer_bridge.test_update import engine_of, holds
from trainer_bridge.session.kept import KEPT, EngineConnection
from trainer_bridge.session.participant import participants_of
from trainer_bridge.sources.parameters import Named
from trainer_bridge.transfer.layout import gpu_of
from trainer_bridge.transport.rank_client import RankClients
from trainer_bridge.updates.update import update
from trainer_bridge.ways.carriers import Bucket
from trainer_bridge.ways.sender import Sender

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


# -- what is kept between updates


class Client:
    """An engine that only tells its layout."""

    def __init__(self, state: str = "serving") -> None:
        self.asked = 0
        self.layout = layout(state=state)

    def control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
        assert message == {"op": "layout"}
        self.asked += 1
        return dict(self.layout)

    def close(self) -> None:
        pass


def test_the_layout_is_asked_once_until_a_failure() -> None:
    """Or until the first update of one with dummy weights, which learns from it what is FP32."""
    client = Client(state="quarantined")
    connection = EngineConnection(client)
    for _ in range(3):
        assert connection.layout() == client.layout
    assert client.asked == 1
    client.layout["bucket_bytes"] = 2 * BUCKET_BYTES
    connection.forget()
    assert connection.layout()["bucket_bytes"] == 2 * BUCKET_BYTES
    client.layout.update(state="serving", fp32=["a"])
    for _ in range(2):
        connection.committed(Policy("a run", 0))
        assert connection.layout()["fp32"] == ["a"]
    assert client.asked == 3


def test_a_failure_frees_the_memory_that_no_other_engine_has_open() -> None:
    one, two = EngineConnection(Client()), EngineConnection(Client())
    sender = Sender(one.layout())
    bucket = sender._bucket = Bucket(64)
    for connection in (one, two):
        connection.use(sender)
    one.forget()
    assert (one.sender, bucket.close.alive) == (None, True)
    two.use(Sender(two.layout()))
    assert not bucket.close.alive


def test_an_address_has_one_link_for_each_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all of them are closed with it."""
    monkeypatch.delenv("FP8RL_KEY", raising=False)
    other, links = KEPT.connection_to("http://a:2"), []
    for key in (None, "first", "second"):
        if key is not None:
            monkeypatch.setenv("FP8RL_KEY", key)
        links.append(KEPT.connection_to("http://a:1"))
        assert KEPT.connection_to("http://a:1") is links[-1]
    assert len({*map(id, [*links, other])}) == 4
    KEPT.close("http://a:1")
    assert KEPT.connection_to("http://a:1") not in links
    monkeypatch.delenv("FP8RL_KEY")
    assert KEPT.connection_to("http://a:1") not in links
    assert KEPT.connection_to("http://a:2") is other


@pytest.mark.parametrize(
    ("address", "others"),
    [
        ("http://localhost:30000", ["http://localhost:30000/", "HTTP://LOCALHOST:30000"]),
        ("http://[fe80::1]:3", ["http://[FE80::1]:3//"]),
        ("http://host", ["http://host:80", "http://Host:80/"]),
        ("https://host/Path", ["https://HOST:443/Path/"]),
    ],
)
def test_an_address_is_the_same_in_every_spelling(address: str, others: list[str]) -> None:
    """Each link would have a bucket of memory of its own."""
    connection = KEPT.connection_to(address)
    assert [KEPT.connection_to(other) for other in others] == [connection] * len(others)
    # the controls: another path, port, scheme or name of the same host
    different = ["https://host/path", "http://host:443", "http://host:30000", "http://127.0.0.1"]
    assert connection not in [KEPT.connection_to(other) for other in different]
    KEPT.close(others[0])
    assert KEPT.connection_to(address) is not connection


class InProcess:
    """Stands for an ``sgl.Engine``: another package's class, two of whose objects may be equal."""

    def fp8rl_control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
        return layout(state="serving")

    def __eq__(self, other: object) -> bool:  # so it has no hash
        return True


def test_an_engine_has_one_link_that_ends_with_it() -> None:
    """And lives as long as its update; nothing is written into the engine."""
    engine, other, closed = InProcess(), Client(), InProcess()
    connection = KEPT.connection_to(engine)
    assert KEPT.connection_to(engine) is connection and vars(engine) == {}
    links = connection, KEPT.connection_to(other), KEPT.connection_to(closed)
    assert len({*map(id, links)}) == 3
    KEPT.close(closed)
    assert id(closed) not in KEPT._of_objects
    assert KEPT.connection_to(closed) is not links[-1]
    gone, (member,) = weakref.ref(connection), participants_of([engine])
    del connection, engine, links
    gc.collect()
    assert gone() is not None
    assert member.connection.layout()["state"] == "serving"
    del member
    gc.collect()
    assert gone() is None
    assert id(other) in KEPT._of_objects


def test_the_gpu_of_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    held = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))
    on_host: Named = [("a", torch.ones(4, 4))]
    on_gpu: Named = [("b", cast(torch.Tensor, held))]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for is_there, named, gpus, found in (
        (False, on_host, [GPU], None),
        (True, on_host, [GPU], torch.device("cuda", 3)),
        (True, on_gpu, [GPU], torch.device("cuda", 1)),
        (True, on_host, [], None),
        (True, on_gpu, [], None),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
        assert gpu_of(named, {"gpus": gpus}) == found
