"""Memory that is written by NIXL: real transfers over UCX, to another process of this host."""

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch

from sgl_fp8rl.protocol.nixl_memory import Exposed, NixlError, Writer, writer_to
from tests.trainer_bridge.ranks import forkserver

pytest.importorskip("nixl._api", reason="NIXL is not installed (extra nixl)")
pytestmark = pytest.mark.timeout(240)

NBYTES, LARGE = 1 << 20, 1 << 29
START_S, STEP_S = 120.0, 30.0


def expose(nbytes: int, pipe: Connection, variables: dict[str, str]) -> None:
    """Another process: exposes zeros, and answers each number of bytes with so many of them."""
    os.environ.update(variables)
    content = torch.zeros(nbytes, dtype=torch.uint8)
    exposed = Exposed(content)
    pipe.send(exposed.told)
    while (count := pipe.recv()) is not None:
        pipe.send_bytes(content[:count].numpy().tobytes())


class Engine:
    def __init__(self, nbytes: int) -> None:
        context = forkserver()
        self.pipe, theirs = context.Pipe()
        arguments = nbytes, theirs, dict(os.environ)
        self.process = context.Process(target=expose, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        assert self.pipe.poll(START_S)
        self.told = self.pipe.recv()

    def content(self, count: int) -> bytes:
        self.pipe.send(count)
        assert self.pipe.poll(STEP_S)
        return self.pipe.recv_bytes()


@pytest.fixture(params=["tcp,sm,self", "tcp"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What UCX chooses between processes of one host, and TCP."""
    monkeypatch.setenv("UCX_TLS", request.param)


@pytest.fixture
def engine(transport: None, request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = Engine(getattr(request, "param", NBYTES))
    yield made
    made.process.kill()
    made.process.join()


def never() -> bool:
    return False


def test_what_is_written_is_there(engine: Engine) -> None:
    """All of it, when the call returns: also where the same memory is written from again."""
    writer, data = writer_to(engine.told), torch.empty(NBYTES, dtype=torch.uint8)
    assert writer_to(engine.told) is writer
    for _ in range(3):
        data.random_(256)
        half = NBYTES // 2
        writer.write(data[half:], half, STEP_S, never)
        writer.write(data[:half], 0, STEP_S, never)
        assert engine.content(NBYTES) == data.numpy().tobytes()


@pytest.mark.parametrize("offset", [1, NBYTES, -1])
def test_nothing_outside_is_written(engine: Engine, offset: int) -> None:
    data = torch.ones(NBYTES, dtype=torch.uint8)
    with pytest.raises(NixlError, match="could not be written"):
        Writer(engine.told).write(data, offset, STEP_S, never)
    assert not any(engine.content(NBYTES))


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
@pytest.mark.parametrize("engine", [LARGE], indirect=True)
@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL, None])
def test_it_ends_where_the_other_end_does_not_answer(
    engine: Engine, fault: signal.Signals | None
) -> None:
    """In time where it hangs; at once where the caller hears that it is over. Over shared memory
    UCX needs no answer of a process that is stopped."""
    writer, data = Writer(engine.told), torch.ones(LARGE, dtype=torch.uint8)
    writer.write(data[:1], 0, STEP_S, never)  # connected
    assert engine.process.pid is not None
    if fault is not None:
        os.kill(engine.process.pid, fault)
    began = time.monotonic()
    with pytest.raises(NixlError, match="could not be written"):
        writer.write(data, 0, 2.0, lambda: fault is None)
    assert time.monotonic() - began < 10.0


@pytest.mark.parametrize(
    "told",
    [None, {}, {"agent": "", "address": -1}, {"agent": "?", "address": 0}, {"agent": "aGk="}],
)
def test_what_is_no_exposed_memory_is_refused(told: object) -> None:
    with pytest.raises(NixlError, match=r"exposed|metadata"):
        Writer(told)
