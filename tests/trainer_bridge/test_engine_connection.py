"""What a trainer keeps of an engine between updates, and when it lets go of it."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from sgl_fp8rl.protocol.policy import Policy
from tests.trainer_bridge.test_sender import BUCKET_BYTES, GPU, layout
from trainer_bridge.session.kept import KEPT, EngineConnection
from trainer_bridge.session.participant import participants_of
from trainer_bridge.sources.parameters import Named
from trainer_bridge.transfer.layout import gpu_of
from trainer_bridge.ways.carriers import Bucket
from trainer_bridge.ways.sender import Sender

pytestmark = pytest.mark.timeout(60)


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


# -- the layout


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


# -- memory


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


# -- which link


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


# -- through which GPU


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
