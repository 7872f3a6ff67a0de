"""The sockets between trainer and ranks: failures that end at once, and nobody left waiting."""

import gc
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_fp8rl.protocol import framing
from tests.trainer_bridge.fake_rank import TOKEN, Rank, hang_up, refuse
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.transport.rank_client import Content, RankClients
from trainer_bridge.transport.relay_client import RelayClient

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    """Two ranks; at the end no trainer may be left on their sockets."""
    ranks = [Rank(tmp_path), Rank(tmp_path)]
    yield ranks
    for rank in ranks:
        rank.join()


def connect(ranks: list[Rank]) -> RankClients:
    return RankClients([rank.path for rank in ranks], TOKEN)


def test_all_are_told_and_answer_in_rank_order(ranks: list[Rank]) -> None:
    for number, rank in enumerate(ranks):
        rank.answer = lambda message, number=number: {"ok": True, "rank": number}  # type: ignore[misc]
    connected = connect(ranks)
    assert [reply["rank"] for reply in connected.ask({"op": "finish"})] == [0, 1]
    connected.close()
    for rank in ranks:
        assert rank.messages == [{"token": TOKEN}, {"op": "finish"}]


@pytest.mark.parametrize(
    ("first", "second", "common"),
    [
        ({"known": ["a", "b"]}, {"known": ["b", "c"]}, {"b"}),
        ({"known": ["a"]}, {"known": []}, set()),
        ({"known": ["a"]}, {"ok": True}, set()),
    ],
)
def test_only_what_every_rank_has_open_is_known(
    ranks: list[Rank], first: dict[str, Any], second: dict[str, Any], common: set[str]
) -> None:
    ranks[0].answer, ranks[1].answer = lambda message: first, lambda message: second
    connected = connect(ranks)
    assert connected.known == common
    connected.close()


@pytest.mark.parametrize("known", [None, 1, "a", [1], [["a"]], {"a": 1}])
def test_what_a_rank_has_open_is_a_list_of_names(ranks: list[Rank], known: Any) -> None:
    ranks[1].answer = lambda message: {"ok": True, "known": known}
    with pytest.raises(EngineError, match="as its known"):
        connect(ranks)


@pytest.mark.parametrize(("paths", "token"), [(None, "t"), ([], "t"), (["a", 1], "t"), (["a"], 1)])
def test_an_engine_names_its_sockets(paths: Any, token: Any) -> None:
    with pytest.raises(EngineError, match=r"as its (sockets|token)"):
        RankClients(paths, token)


@pytest.mark.parametrize("error", [None, 1, [], {"a": "b" * 9999}, ""])
def test_an_error_that_is_not_a_sentence_becomes_one(ranks: list[Rank], error: Any) -> None:
    ranks[1].answer = lambda message: {"error": error}
    with pytest.raises(EngineError, match=r"gives .* as its error; see its log") as held:
        connect(ranks)
    assert len(str(held.value)) < 300


def test_a_rank_cannot_be_reached(tmp_path: Path, ranks: list[Rank]) -> None:
    for path in (str(tmp_path / "none"), "/tmp/\ud800", "/tmp/\0"):  # the last two are invalid
        with pytest.raises(EngineError, match=r"one host.*same user"):
            RankClients([*(rank.path for rank in ranks), path], TOKEN)


def test_a_host_that_is_no_name_cannot_be_reached() -> None:
    with pytest.raises(EngineError, match=r"relay at .* cannot be reached"):
        RelayClient({"host": "a" * 64, "port": 1}, TOKEN, None, 1.0)


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [(None, r"one host.*same user"), ({"error": "another session"}, r"^another session$")],
)
def test_a_rank_that_refuses_the_token_lets_all_go(
    ranks: list[Rank], reply: dict[str, Any] | None, sentence: str
) -> None:
    """Also while the error is still held, as it is in an ``except`` clause."""
    ranks[1].answer = lambda message: reply
    with pytest.raises(EngineError, match=sentence) as held:
        connect(ranks)
    for rank in ranks:
        rank.join()
    assert held.value is not None


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_is_gone_is_told_no_more(ranks: list[Rank], gone: int) -> None:
    """It is when its reply is awaited that this is known; the others still hear what is sent."""
    ranks[gone].answer, ranks[1 - gone].answer = hang_up("finish"), hang_up("abort")
    connected = connect(ranks)
    with pytest.raises(EngineError, match=r"engine.* log"):
        connected.ask({"op": "finish"})
    ranks[gone].join()
    connected.send({"op": "abort"})
    ranks[1 - gone].join()
    assert ranks[1 - gone].ops() == ["hello", "finish", "abort"]
    connected.close()


def test_the_last_word_of_a_rank_that_is_gone_is_heard(ranks: list[Rank]) -> None:
    """It says what failed, and hangs up on what the trainer has sent ahead."""
    ranks[0].answer = refuse("finish", "no room")
    connected = connect(ranks)
    connected.send({"op": "finish"})
    ranks[0].join()
    connected.send({"op": "finish"})
    with pytest.raises(EngineError, match=r"^no room$"):
        connected.wait()
    connected.close()


def test_a_rank_that_does_not_answer(ranks: list[Rank]) -> None:
    connected = connect(ranks)
    connected.timeout_s = 0.3
    with pytest.raises(EngineError, match=r"longer than .* s over a step.* log"):
        connected.wait()
    connected.close()


def test_engines_that_hang_are_waited_for_together(ranks: list[Rank]) -> None:
    """Two of three used up the time of a step; the third has answered, or hangs as well."""
    hangs = threading.Event()
    ready, hanging = (RankClients([rank.path], TOKEN, timeout_s=30) for rank in ranks)
    ranks[1].answer = lambda message: {"ok": hangs.wait(30)}
    for each in (ready, hanging):
        each.send({"op": "finish"})
    answers = [connected.fileno() for connected in ready._sockets]
    assert select.select(answers, [], [], 30)[0] == answers, "it has answered"
    began = time.monotonic()
    assert [reply["ok"] for reply in ready.wait(began - 60)] == [True]
    with pytest.raises(EngineError, match="longer than 30 s"):
        hanging.wait(began - 60)
    assert time.monotonic() - began < 15
    hangs.set()
    ready.close()
    hanging.close()


@contextmanager
def silent_relay(timeout_s: float) -> Iterator[RelayClient]:
    """A connection to a relay that says hello, and then neither answers nor reads."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        opened: list[socket.socket] = []

        def stall() -> None:
            peer, _ = listener.accept()
            framing.receive(peer)
            framing.send(peer, {"ok": True, "known": []})
            opened.append(peer)

        thread = threading.Thread(target=stall, daemon=True)
        thread.start()
        where = {"host": "127.0.0.1", "port": listener.getsockname()[1]}
        relay = RelayClient(where, TOKEN, None, timeout_s)
        thread.join(10)
        yield relay
        opened[0].close()


def test_a_stalled_connection_is_waited_for_once() -> None:
    """To another host: neither what is sent nor what is awaited comes through."""
    with silent_relay(timeout_s=2.0) as relay:
        content = Content(0, torch.zeros(64 << 20, dtype=torch.uint8))
        began = time.monotonic()
        relay.send_chunk({"op": "chunk", "index": 0}, content)
        assert time.monotonic() - began < 1.0, "the trainer gathers on meanwhile"
        with pytest.raises(EngineError, match="longer than 2 s"):
            relay.wait(began)
        stalled_s = time.monotonic() - began
        assert stalled_s >= 2.0
        relay.send({"op": "abort", "reason": "x" * (1 << 20)})
        relay.close()
        assert time.monotonic() - began < stalled_s + 2.0


@pytest.mark.parametrize("is_closed", [True, False])
def test_no_thread_outlives_a_connection(is_closed: bool) -> None:
    """Torch aborts a process one of whose threads lets go of a tensor while the interpreter ends:
    a trainer whose training is over."""
    before = set(threading.enumerate())
    with silent_relay(timeout_s=2.0) as relay:
        relay.send_chunk({"op": "chunk"}, Content(0, torch.zeros(8, dtype=torch.uint8)))
        (sender,) = set(threading.enumerate()) - before
        if is_closed:
            relay.close()
        kept = weakref.ref(relay)
    del relay
    gc.collect()
    assert kept() is None
    assert not sender.is_alive()
