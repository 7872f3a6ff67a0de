"""A rank's socket: whatever a trainer sends ends the session with a sentence, never the server."""

import fcntl
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_fp8rl.protocol import framing
from sgl_fp8rl.protocol.cuda_memory import CudaMemoryError, Handle
from sgl_fp8rl.protocol.manifest import describe
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.values import excerpt
from sgl_fp8rl.receiver import rank_server as rank_server_module
from sgl_fp8rl.receiver.rank_server import Outcome, RankSocket, last_activity, serve
from sgl_fp8rl.receiver.session import Session
from sgl_fp8rl.receiver.writers.shared_memory import SharedMemory
from tests.sgl_fp8rl.protocol.test_framing import descriptors
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.test_shared_memory import sealed

SHAPES: toy.Shapes = {"w": (256, 128), "n": (64,)}
BUCKET = 1 << 17
"""``w`` is chunk 0 and fills a half, ``n`` is chunk 1."""
TOKEN = "the session's token"
JOIN_S = 60.0


class RankThread:
    """Serves one session on one rank, as the scheduler's main thread does."""

    def __init__(self, session: Session, silence_s: float = 30.0, num_engines: int = 1) -> None:
        self.socket = RankSocket(0)
        self.path = str(self.socket.path)
        self.peer: Any = None

        def run() -> tuple[Outcome, Any]:
            try:
                return serve(self.socket, session, TOKEN, silence_s, num_engines)
            finally:
                self.socket.close()

        with_one_thread = ThreadPoolExecutor(1)
        self._served = with_one_thread.submit(run)
        with_one_thread.shutdown(wait=False)

    def outcome(self) -> Outcome:
        """How the session ended; what ``serve`` lets through would have ended the server."""
        outcome, self.peer = self._served.result(JOIN_S)
        return outcome


class Trainer:
    """One session of one rank, and a raw connection to it."""

    def __init__(self, silence_s: float = 20.0, num_engines: int = 1) -> None:
        storage = {**toy.fp8_storage("w", 256, 128), "n": torch.zeros(64, dtype=toy.BF16)}
        self.model = toy.Model(storage)
        self.tensors = toy.checkpoint(shapes=SHAPES)
        self.weights = toy.engine(self.model, SHAPES)
        manifest = describe(self.tensors.items(), BUCKET // 2)
        self.weights.accept(manifest)
        self.session = self.weights.begin(manifest.fingerprint, Policy(toy.RUN, 0))
        self.rank = RankThread(self.session, silence_s=silence_s, num_engines=num_engines)
        self.sock = self.connect()

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(20)
        sock.connect(self.rank.path)
        return sock

    def ask(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> dict[str, Any]:
        framing.send(self.sock, message, fds)
        return framing.receive(self.sock)[0]

    def greet(self) -> None:
        assert self.ask({"token": TOKEN}) == {"ok": True, "known": self.weights.memory.known()}

    def open_bucket(self, bucket_name: str = "b") -> None:
        fd = sealed(BUCKET)
        message = {"op": "bucket", "name": bucket_name, "bytes": BUCKET}
        assert self.ask(message, (fd,)) == {"ok": True}
        os.close(fd)
        for index in range(len(SHAPES)):
            toy.fill(self.session, self.tensors, index)

    def chunk(self, index: Any) -> dict[str, Any]:
        return self.ask({"op": "chunk", "index": index})

    def send_all(self) -> None:
        for index in range(len(SHAPES)):
            assert self.chunk(index) == {"ok": True}

    def commit(self) -> Outcome:
        """Send all, and return what the rank waits with for the others."""
        self.send_all()
        assert self.ask({"op": "finish"}) == {"ok": True, "gpu_seconds": None}
        framing.send(self.sock, {"op": "commit"})
        return self.rank.outcome()

    def abort(self, **more: Any) -> Outcome:
        framing.send(self.sock, {"op": "abort", **more})
        return self.rank.outcome()

    def close(self) -> None:
        self.sock.close()


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    # pytest keeps what is logged, and so the frames of an exception with the bucket in them
    monkeypatch.setattr(rank_server_module.logger, "disabled", True)
    before = descriptors()
    trainer = Trainer()
    trainer.greet()
    yield trainer
    trainer.close()
    outcome = trainer.rank.outcome()
    if trainer.rank.peer is not None:
        trainer.rank.peer.close()
    assert outcome.committed or outcome.reason
    assert not Path(trainer.rank.path).parent.exists()
    trainer.weights.memory.close()
    assert descriptors() == before


def test_each_message_is_seen_from_outside(trainer: Trainer) -> None:
    os.utime(trainer.rank.path, (1, 1))
    assert last_activity(trainer.rank.path) == 1
    trainer.open_bucket()
    assert last_activity(trainer.rank.path) == pytest.approx(time.time(), abs=60)
    trainer.send_all()
    trainer.abort()
    assert last_activity(trainer.rank.path) == 0


def test_a_good_session_commits_and_the_next_hears_what_is_open(trainer: Trainer) -> None:
    trainer.open_bucket()
    outcome = trainer.commit()
    assert outcome.committed and outcome.dirty
    trainer.weights.commit()
    rank_server_module.reply(trainer.rank.peer, {"ok": True})
    assert framing.receive(trainer.sock)[0] == {"ok": True}
    assert torch.equal(trainer.model.data("n"), trainer.tensors["n"])
    trainer.close()
    trainer.model.data("n").zero_()

    trainer.session = trainer.weights.begin(
        trainer.session.writer.manifest.fingerprint, Policy(toy.RUN, 1)
    )
    trainer.rank = RankThread(trainer.session)
    trainer.sock = trainer.connect()
    assert trainer.ask({"token": TOKEN}) == {"ok": True, "known": ["b"]}
    trainer.send_all()  # from the bucket that is open
    assert torch.equal(trainer.model.data("n"), trainer.tensors["n"])


def test_the_socket_is_for_this_user_alone() -> None:
    rank_socket = RankSocket(3)
    assert stat.S_IMODE(rank_socket.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(rank_socket.path.parent.stat().st_mode) == 0o700
    rank_socket.close()
    assert not rank_socket.path.parent.exists()


def framed(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


@pytest.mark.parametrize(
    "hello",
    [
        framed(b'{"token": "another"}'),
        framed(b'{"token": null}'),
        framed(b"no JSON"),
        framed(b"[" * 100_000),
        b"\xff\xff\xff\xff",
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
    ],
)
def test_a_stranger_is_turned_away_and_the_trainer_served(hello: bytes) -> None:
    trainer = Trainer()
    trainer.sock.sendall(hello)
    trainer.sock.shutdown(socket.SHUT_WR)
    heard = b""
    with suppress(ConnectionResetError):
        while more := trainer.sock.recv(4096):
            heard += more  # until the rank hung up
    assert (b"serves another session" in heard) == (b"token" in hello)
    trainer.close()
    trainer.sock = trainer.connect()
    trainer.greet()
    assert trainer.abort(reason="the right one was served").reason == "the right one was served"
    trainer.rank.peer.close()
    trainer.close()


@pytest.mark.guarantee("all-or-none", fault="a begin of several engines whose sender never comes")
@pytest.mark.parametrize("num_engines", [1, 2])
def test_no_trainer_at_all(monkeypatch: pytest.MonkeyPatch, num_engines: int) -> None:
    monkeypatch.setattr(rank_server_module, "CONNECT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(Trainer, "connect", lambda self: socket.socket())
    trainer = Trainer(num_engines=num_engines)
    outcome = trainer.rank.outcome()
    assert (outcome.committed, outcome.dirty) == (False, False)
    assert "no trainer" in outcome.reason
    trainer.close()


@pytest.mark.guarantee("quarantine", fault="an abort while the rank is busy with a step")
def test_an_abort_is_heard_though_the_trainer_has_hung_up(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = threading.Event()
    monkeypatch.setattr(
        trainer.weights.memory, "open_bucket", lambda message, fds: gone.wait(20) and None
    )
    framing.send(trainer.sock, {"op": "bucket", "name": "b", "bytes": BUCKET})
    framing.send(trainer.sock, {"op": "abort", "reason": "out of memory \udcff"})
    trainer.close()
    gone.set()
    outcome = trainer.rank.outcome()
    assert outcome.reason == "out of memory ?", "and it can be sent on as JSON"
    assert not outcome.dirty


Act = Callable[[Trainer], Any]


def bucket_of(size: int, announced: Any, count: int = 1, seals: int = fcntl.F_SEAL_SHRINK) -> Act:
    def act(trainer: Trainer) -> Any:
        fd = sealed(size, seals)
        try:
            message = {"op": "bucket", "name": "b", "bytes": announced}
            return trainer.ask(message, (fd,) * count)
        finally:
            os.close(fd)

    return act


def opened(act: Act) -> Act:
    def both(trainer: Trainer) -> Any:
        trainer.open_bucket()
        return act(trainer)

    return both


def with_descriptor(message: dict[str, Any]) -> Act:
    def act(trainer: Trainer) -> Any:
        with Path("/proc/self/stat").open() as carried:
            return trainer.ask(message, (carried.fileno(),))

    return act


def chunks(*indices: Any) -> Act:
    return lambda trainer: [trainer.chunk(index) for index in indices][-1]


def broken(error: Exception) -> Act:
    """The rank fails to write."""

    def act(trainer: Trainer) -> Any:
        def write(_: int) -> None:
            raise error

        trainer.session.write = write  # type: ignore[method-assign]
        return trainer.chunk(0)

    return act


def nan(trainer: Trainer) -> Any:
    trainer.tensors["w"][200, 100] = float("nan")
    trainer.open_bucket()
    return trainer.chunk(0)


class OddError(Exception):
    pass


HANDLE = Handle("00" * 64, BUCKET, "GPU-00000000-0000-0000-0000-000000000000").to_json()
SEGMENTS = {"op": "segments", "name": "s", "places": {}}

REFUSED: dict[str, tuple[Act, str]] = {
    **{
        f"not {size} bytes": (
            bucket_of(4096, size),
            f"is 4096 bytes but was announced as {size}",
        )
        for size in (0, -1, 4097, 1 << 70)
    },
    **{
        f"of {size!r} bytes": (bucket_of(4096, size), f"{excerpt(size)} as its bytes")
        for size in (None, [], "64", 64.0, float("inf"), True)
    },
    **{
        f"{count} descriptors": (bucket_of(4096, 4096, count), "is 0 bytes but was announced as")
        for count in (0, 2)
    },
    "not sealed": (bucket_of(64, 64, seals=0), "the bucket's size is not sealed"),
    "no name": (with_descriptor({"op": "bucket", "bytes": 64}), "None as its name"),
    "a list of names": (with_descriptor({"op": "bucket", "bytes": 64, "name": []}), "as its name"),
    "a device bucket": (
        lambda t: t.ask({"op": "bucket", "name": "b", "handle": HANDLE}),
        "runs on a CPU",
    ),
    "no handle": (
        lambda t: t.ask({"op": "bucket", "name": "b", "handle": None}),
        "a memory handle must have the fields",
    ),
    "parameters in place": (lambda t: t.ask({**SEGMENTS, "handles": [HANDLE]}), "runs on a CPU"),
    "no handles": (with_descriptor(SEGMENTS), "None as its handles"),
    "handles are null": (lambda t: t.ask({**SEGMENTS, "handles": None}), "None as its handles"),
    "a chunk first": (chunks(0), "open the bucket first"),
    "too small for two chunks": (
        lambda t: bucket_of(BUCKET, BUCKET - 1)(t) and t.chunk(0),
        "131071 bytes, its slots need 131072",
    ),
    "an unknown step": (lambda t: t.ask({"op": "eval"}), "no step 'eval'"),
    "no step": (with_descriptor({}), "no step None"),
    "no number of a part": (with_descriptor({"op": "chunk"}), "chunk None is not awaited"),
    **{
        f"chunk {index}": (opened(chunks(index)), f"chunk {index} is not awaited")
        for index in (2, -1, 2**70, [0], True, 1.0, None)
    },
    "an error of any class": (
        opened(broken(OddError("nobody foresaw it"))),
        "OddError: nobody foresaw it",
    ),
    "finish first": (lambda t: t.ask({"op": "finish"}), "2 of 2 chunks are missing, w among them"),
}
DIRTY: dict[str, tuple[Act, str]] = {
    "a chunk twice": (opened(chunks(0, 0)), "chunk 0 is not awaited"),
    "NaN in a part": (nan, "w holds NaN or Inf"),
}


@pytest.mark.guarantee("malformed", fault="steps of an update with missing, wrong or extra fields")
@pytest.mark.parametrize("name", REFUSED | DIRTY)
def test_a_malformed_step_ends_the_session(trainer: Trainer, name: str) -> None:
    act, fault = (REFUSED | DIRTY)[name]
    answer = act(trainer)
    outcome = trainer.rank.outcome()
    assert (outcome.committed, outcome.dirty) == (False, name in DIRTY)
    assert answer == {"error": outcome.reason}
    assert fault in outcome.reason
    assert trainer.sock.recv(1) == b""  # the rank hung up


@pytest.mark.parametrize("op", ["bucket", "segments"])
def test_a_trainer_hears_that_host_memory_would_do(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """Where its GPU memory cannot be opened; nothing is written then."""

    def refuse(handle: Handle, device: int) -> None:
        raise CudaMemoryError("these GPUs have no peer access")

    monkeypatch.setattr("sgl_fp8rl.receiver.writers.shared_memory.Mapping", refuse)
    trainer.weights.memory = SharedMemory(torch.device("cuda", 0))
    message = {"op": op, "name": "x", "handle": HANDLE, "handles": [HANDLE], "places": {}}
    assert trainer.ask(message) == {"error": "these GPUs have no peer access", "retry": "host"}
    outcome = trainer.rank.outcome()
    assert (outcome.committed, outcome.dirty) == (False, False)


def deaf(trainer: Trainer) -> None:
    """It dies before it hears the replies."""
    fd = sealed(BUCKET)
    for _ in range(20):
        again = {"op": "bucket", "name": "b", "bytes": BUCKET, "padding": "x" * 10_000}
        framing.send(trainer.sock, again, (fd,))
    os.close(fd)
    trainer.close()


ENDS: dict[str, tuple[int, Callable[[Trainer], object], str]] = {
    "commit before finish": (2, lambda t: framing.send(t.sock, {"op": "commit"}), "before finish"),
    **{f"dies after {sent}": (sent, Trainer.close, "is gone") for sent in range(3)},
    "dies before it hears": (0, deaf, "is gone"),
}
"""Chunks that come, what is done then, and the reason that is given."""


@pytest.mark.guarantee("quarantine", fault="the trainer dies before, between and after the chunks")
@pytest.mark.parametrize("name", ENDS)
def test_how_a_session_ends(trainer: Trainer, name: str) -> None:
    sent, end, reason = ENDS[name]
    trainer.open_bucket()
    for index in range(sent):
        trainer.chunk(index)
    end(trainer)
    outcome = trainer.rank.outcome()
    assert (outcome.committed, outcome.dirty) == (False, sent > 0)
    assert reason in outcome.reason
    # it waits for the reply of all ranks
    assert trainer.rank.peer is not None or name != "commit before finish"


def test_a_trainer_that_falls_silent() -> None:
    trainer = Trainer(silence_s=0.2)
    trainer.greet()
    outcome = trainer.rank.outcome()
    assert not outcome.committed
    assert "silent" in outcome.reason
    assert trainer.sock.recv(1) == b""
    trainer.close()


def test_a_temporary_folder_with_a_long_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A Unix socket's path has 108 bytes; what was made for it must not stay behind."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(OSError, match="AF_UNIX path too long"):
        RankSocket(0)
    assert list(long.iterdir()) == []


@pytest.mark.parametrize("is_ours", [True, False])
def test_peers_that_are_turned_away_do_not_hold_the_engine(
    monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    """Those of another user not by sending nothing either: nothing they send reaches a parser."""
    monkeypatch.setattr(framing, "peer_uid", lambda peer: os.getuid() + (not is_ours))
    monkeypatch.setattr(rank_server_module, "CONNECT_TIMEOUT_S", 0.5)
    rank_socket, done, heard = RankSocket(0), threading.Event(), list[bytes]()

    def knock() -> None:
        while not done.wait(0.05):
            with suppress(OSError), socket.socket(socket.AF_UNIX) as peer:
                peer.settimeout(20)
                peer.connect(str(rank_socket.path))
                if is_ours:
                    framing.send(peer, {"token": "another"})
                heard.append(peer.recv(4096))

    knocker = threading.Thread(target=knock, daemon=True)
    knocker.start()
    try:
        with pytest.raises(TimeoutError):
            rank_socket.accept("mine", 1.0, [])
    finally:
        done.set()
        rank_socket.close()
        knocker.join(5)
    assert b"another session" in heard[0]


def test_silent_peers_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has less time than what is left of it; in that of all the trainer is waited for."""
    times = iter([0.0, 1.0, 25.0, 31.0])
    monkeypatch.setattr(rank_server_module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    given: list[float | None] = []

    def silent(peer: socket.socket, most_bytes: int) -> None:
        given.append(peer.gettimeout())
        assert most_bytes < 1 << 16, "of a peer that is not known yet little is read"
        raise TimeoutError

    monkeypatch.setattr(framing, "receive", silent)
    rank_socket = RankSocket(0)
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as other:
        for peer in (one, other):
            peer.connect(str(rank_socket.path))
        with pytest.raises(TimeoutError, match="no trainer"):
            rank_socket.accept("mine", 1.0, [])
    rank_socket.close()
    assert given == [10.0, 5.0]
