"""Updates of an engine on another host by NIXL, and of a trainer on a GPU: real sessions and
transfers, ranks in threads."""

import sys
from types import ModuleType

import pytest
import torch

from sgl_fp8rl.protocol import nixl_memory
from sgl_fp8rl.protocol.nixl_memory import Writer
from sgl_fp8rl.protocol.states import State
from tests.fuzz.decoder import to_frames
from tests.fuzz.frames import arrived
from tests.fuzz.relay import BUCKET, CHUNK, threadless
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge.test_matrix import Way, on_gpu
from tests.trainer_bridge.test_remote_engine import SNAPSHOT_BYTES, sent, step, with_snapshots
from tests.trainer_bridge.test_update import SMALL, holds
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.session.kept import KEPT
from trainer_bridge.updates.update import update
from trainer_bridge.ways.remote import Changes

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("also", [{}, {"change": 8}])
def test_a_relay_that_exposes_nothing_takes_no_chunk_as_written(also: dict[str, int]) -> None:
    relay = threadless()
    with arrived(to_frames([BUCKET, {**CHUNK, "written": True, **also}])) as sock:
        relay._pass_message(sock, sock)
        with pytest.raises(ValueError, match="not exposed"):
            relay._pass_message(sock, sock)


@pytest.mark.parametrize("transports", [None, "all", "rc,all", "^ud"])
def test_plain_tcp_needs_a_word(transports: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reaches a port of UCX's could write anywhere in the process."""
    for name in ("nixl", "nixl._api"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    nixl_memory.check_usable()
    for sound in ("^tcp", "rc,ud,sm,self"):
        monkeypatch.setenv(nixl_memory.TRANSPORTS, sound)
        nixl_memory.check_usable()
    if transports is None:
        monkeypatch.delenv(nixl_memory.TRANSPORTS)
    else:
        monkeypatch.setenv(nixl_memory.TRANSPORTS, transports)
    with pytest.raises(nixl_memory.NixlError, match=nixl_memory.TRANSPORTS):
        nixl_memory.check_usable()


def nixl_engine(snapshot_bytes: int = 0) -> FakeEngine:
    pytest.importorskip("nixl._api", reason="NIXL is not installed (extra nixl)")
    return Way(SMALL, snapshot_bytes, network="nixl").engine(2)


def test_changes_go_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, written, write = nixl_engine(SNAPSHOT_BYTES), [], Writer.write
    monkeypatch.setattr(Writer, "write", lambda *args: written.append(args) or write(*args))
    for version in range(3):
        written.clear()
        sent(engine, toy.checkpoint(version), version)
        assert bool(written) == (version == 0)


def test_a_transfer_that_fails_ends_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, write = nixl_engine(), Writer.write
    update(toy.checkpoint(0), engine, version=0)
    (exposed,) = engine.memories.exposed.values()
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "write", lambda self, data, offset, *a: write(self, data, -1, *a))
        with pytest.raises(EngineError, match="ended the update"):
            update(toy.checkpoint(1), engine, version=1)
    engine.control({"op": "end"})
    assert holds(engine, toy.checkpoint(0)), "no rank was told of a chunk"
    assert not engine.memories.exposed, "what was on its way may not come into the next update"
    sent(engine, toy.checkpoint(2), 2)
    assert exposed not in engine.memories.exposed.values()


# -- a trainer on a GPU, which quantizes weights there and compares them with the last snapshot


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's."""
    on_gpu(monkeypatch)


def test_an_update_that_does_not_commit_leaves_the_snapshot(gpu: None) -> None:
    """NaN is found when all is sent, and before engines write the first byte."""
    (engine,), tensors = with_snapshots(), toy.checkpoint(0)
    kept, bad = KEPT.connection_to(engine).base, step(tensors, 3)
    bad["attn.q.weight"][0, 0] = torch.nan
    with pytest.raises(EngineError, match="NaN"):
        update(bad, engine, version=3)
    assert {weights.state for weights in engine.ranks} == {State.SERVING}, "nothing was written"
    assert KEPT.connection_to(engine).base == kept
    assert sent(engine, step(tensors, 4), 4) < 0.1


def test_a_snapshot_that_the_gpu_has_no_room_for_fails_no_update(
    gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (engine,), tensors = with_snapshots(), toy.checkpoint(0)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Changes, "commit", full)
        sent(engine, step(tensors, 1), 1)
    assert KEPT.connection_to(engine).base is None
    assert "--fp8rl-snapshot-bytes" in caplog.text
    parts = [sent(engine, step(tensors, version), version) for version in (2, 3)]
    assert parts[0] >= 1 and parts[1] < 0.1
