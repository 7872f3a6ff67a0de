"""The bucket between trainer and ranks: halves that take turns, failures that end at once."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_fp8rl.weight_update import wire
from sgl_fp8rl.weight_update.serve import Bucket
from trainer_bridge.engine_client import EngineError
from trainer_bridge.transport.memory import MemoryTransport

Answer = Callable[[dict[str, Any]], dict[str, Any] | None]


class Rank:
    """Answers as told (None hangs up) and keeps the float32 vectors that each part holds."""

    def __init__(self, folder: Path, answer: Answer = lambda message: {"ok": True}) -> None:
        self.path = str(folder / f"{id(self)}.sock")
        self.messages: list[dict[str, Any]] = []
        self.parts: list[list[list[float]]] = []
        self.answer = answer
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(1)
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        peer, _ = self._listener.accept()
        bucket = Bucket()
        with peer, self._listener, suppress(ConnectionError):  # the trainer may hang up
            while True:
                message, fds = wire.receive(peer)
                self.messages.append(message)
                if message.get("op") == "bucket":
                    bucket.open(fds, message["bytes"])
                if message.get("op") == "part":
                    self.parts.append([_read(bucket, entry) for entry in message["tensors"]])
                reply = self.answer(message)
                if reply is None:
                    return
                wire.send(peer, reply)

    def ops(self) -> list[Any]:
        return [message.get("op", "hello") for message in self.messages]


def _read(bucket: Bucket, entry: dict[str, Any]) -> list[float]:
    shape = (entry["rows"][1] - entry["rows"][0],)
    return [float(x) for x in bucket.tensor(entry["offset"], torch.float32, shape)]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    ranks = [Rank(tmp_path), Rank(tmp_path)]
    yield ranks
    for rank in ranks:
        rank.thread.join(20)
        assert not rank.thread.is_alive(), "a rank still waits for the trainer"


def transport_of(ranks: list[Rank], bucket_bytes: int = 512) -> MemoryTransport:
    return MemoryTransport([rank.path for rank in ranks], "token", bucket_bytes)


def refuse(op: str, sentence: str) -> Answer:
    return lambda message: {"error": sentence} if message.get("op") == op else {"ok": True}


def hang_up(op: str) -> Answer:
    return lambda message: None if message.get("op") == op else {"ok": True}


def test_every_rank_reads_every_value_from_alternating_halves(ranks: list[Rank]) -> None:
    transport = transport_of(ranks)
    assert transport.part_bytes == 256
    vectors = [torch.randn(n) for n in (64, 1, 16, 47, 3, 64, 17, 30, 64)]
    for i, vector in enumerate(vectors):
        transport.put(f"v{i}", vector, (0, len(vector)))
    transport.finish()
    transport.commit()
    transport.close()
    for rank in ranks:
        rank.thread.join(20)
        assert [x for part in rank.parts for x in part] == [v.tolist() for v in vectors]
        entries = [m["tensors"] for m in rank.messages if m.get("op") == "part"]
        halves = [{entry["offset"] // 256 for entry in part} for part in entries]
        assert all(len(half) == 1 for half in halves)
        assert [half.pop() for half in halves] == [i % 2 for i in range(len(entries))]
        assert all(entry["offset"] % 64 == 0 for part in entries for entry in part)
        ends = [part[-1]["offset"] % 256 + 4 * part[-1]["rows"][1] for part in entries]
        assert all(end <= 256 for end in ends)
        assert rank.ops() == ["hello", "bucket", *["part"] * len(entries), "finish", "commit"]


def test_a_half_is_not_filled_before_all_ranks_have_read_it(ranks: list[Rank]) -> None:
    """A rank that is slow with the first part still finds its values there."""
    slow = threading.Event()

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        slow.wait(20)
        return {"ok": True}

    ranks[1].answer = answer
    slow.set()
    transport = transport_of(ranks)
    slow.clear()
    full = [torch.full((64,), float(i)) for i in range(3)]
    transport.put("a", full[0], (0, 64))
    transport.put("b", full[1], (0, 64))  # sends a; b fills the other half
    blocked = threading.Thread(target=transport.put, args=("c", full[2], (0, 64)), daemon=True)
    blocked.start()
    blocked.join(0.2)
    assert blocked.is_alive()  # a's half is still being read
    slow.set()
    blocked.join(20)
    transport.finish()
    transport.close()
    for rank in ranks:
        rank.thread.join(20)
        assert [part[0][0] for part in rank.parts] == [0.0, 1.0, 2.0]


def test_a_rank_cannot_be_reached(tmp_path: Path, ranks: list[Rank]) -> None:
    with pytest.raises(EngineError, match=r"cannot be reached .* one host, as the same user"):
        MemoryTransport([*(r.path for r in ranks), str(tmp_path / "none")], "token", 512)


def test_a_token_is_refused(tmp_path: Path, ranks: list[Rank]) -> None:
    ranks[1].answer = lambda message: {"error": "another session"}
    with pytest.raises(EngineError, match=r"^another session$"):
        transport_of(ranks)


@pytest.mark.parametrize("answer", [refuse("bucket", "no memory"), hang_up("bucket")])
def test_a_bucket_that_is_refused_lets_all_ranks_go(ranks: list[Rank], answer: Answer) -> None:
    """Also while the error is still held, as it is in an ``except`` clause."""
    ranks[1].answer = answer
    with pytest.raises(EngineError, match=r"no memory|ended the update") as held:
        transport_of(ranks)
    for rank in ranks:
        rank.thread.join(20)
        assert not rank.thread.is_alive()
    assert held.value is not None


def send_all(transport: MemoryTransport) -> None:
    """A whole update of four tensors."""
    for i in range(4):
        transport.put(f"v{i}", torch.ones(64), (0, 64))
    transport.finish()
    transport.commit()


@pytest.mark.parametrize("op", ["part", "finish", "commit"])
def test_the_sentence_of_the_rank_that_failed_is_raised(ranks: list[Rank], op: str) -> None:
    ranks[1].answer = refuse(op, f"rank 1 refused the {op}")
    transport = transport_of(ranks)

    with pytest.raises(EngineError, match=f"^rank 1 refused the {op}$"):
        send_all(transport)
    transport.abort("the trainer gave up")
    transport.close()
    ranks[0].thread.join(20)
    assert ranks[0].messages[-1] == {"op": "abort", "reason": "the trainer gave up"}


@pytest.mark.parametrize("op", ["part", "finish", "commit"])
def test_a_rank_that_is_gone_ends_the_update(ranks: list[Rank], op: str) -> None:
    ranks[0].answer = hang_up(op)
    transport = transport_of(ranks)

    with pytest.raises(EngineError, match=r"the engine ended the update .* see its log"):
        send_all(transport)
    transport.abort("the trainer gave up")
    transport.close()


def test_a_bucket_that_no_machine_has(ranks: list[Rank]) -> None:
    with pytest.raises(EngineError, match="could be shared"):
        transport_of(ranks, 1 << 62)
