"""A process of a server of two ranks is killed while a trainer updates it and another engine.

SGLang ends the server then. The other engine has real sessions and no SGLang, as an engine of the
same weights that keeps each tensor in BF16.
"""

import os
import select
import signal
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer_bridge
from sgl_fp8rl.protocol.states import State
from tests.engine import models
from tests.engine.conftest import Policies
from tests.engine.harness import BUCKET_BYTES, FORKED, Server
from tests.engine.serving import assert_serves
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge.test_fsdp import plain_engine
from tests.trainer_bridge.test_transaction import states
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.session.participant import Participant
from trainer_bridge.transport.rank_client import RankClients

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

TP = 2
ENVIRONMENT = {"FP8RL_BUCKET_BYTES": str(BUCKET_BYTES), "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
CREDENTIALS = struct.Struct("3i")
"""Process, user and group at the other end of a Unix socket."""
END_S = 60.0
"""SGLang looks after its processes once a second."""


def server_of(log: Path, checkpoint: Path) -> Server:
    return Server(log, FORKED, checkpoint, "--tp-size", f"{TP}", environment=ENVIRONMENT)


def kill(ranks: Any, rank: int) -> None:
    """Kill the process behind one of a trainer's sockets, and wait until it is gone."""
    peer = ranks._sockets[rank].getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, _, _ = CREDENTIALS.unpack(peer)
    process = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(process, signal.SIGKILL)
        assert select.select([process], [], [], END_S)[0], "it outlives SIGKILL"
    finally:
        os.close(process)


def holds(engine: FakeEngine, checkpoint: Path) -> bool:
    model = engine.ranks[0].model
    return all(
        torch.equal(model.get_parameter(name), tensor.to(torch.bfloat16))
        for name, tensor in models.named_tensors(checkpoint)
    )


def assert_ended(server: Server) -> None:
    """It serves nothing: SGLang has ended it."""
    server.process.wait(END_S)
    assert server.status_of("/health") is None


@pytest.mark.guarantee("several-engines", fault="a scheduler of a server of two ranks is killed")
def test_a_scheduler_is_killed(
    policies: Policies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the vote the other engine commits, before it none does; no call waits for the rank that
    lives in vain. The servers are killed one after the other, since each takes a while to start."""
    checkpoints = policies("qwen3")
    tensors = [models.named_tensors(checkpoint) for checkpoint in checkpoints]
    survivor = plain_engine(dict(tensors[0]))
    survivor.bucket_bytes = BUCKET_BYTES

    commit = Participant.commit
    with server_of(tmp_path / "first.log", checkpoints[0]) as server:
        trainer_bridge.update(tensors[1], [server, survivor], version=1)
        assert_serves(server, checkpoints[1], 1, TP)

        # after the vote: what was decided stays so, and the next server is brought to it
        def kill_first(self: Participant, policy: Any) -> None:
            if self.name == "engine 0":
                kill(self.ranks, rank=1)
            commit(self, policy)

        with monkeypatch.context() as patch:
            patch.setattr(Participant, "commit", kill_first)
            with pytest.raises(EngineError, match=r"committed on 1 of 2 .*engine 0"):
                trainer_bridge.update(tensors[2], [server, survivor], version=2)
        assert states(survivor) == [State.SERVING] and holds(survivor, checkpoints[2])
        assert_ended(server)
    with server_of(tmp_path / "second.log", checkpoints[0]) as server:
        before = len(survivor.ops)
        result = trainer_bridge.update(tensors[2], [server, survivor], version=2)
        assert result.failed == {} and survivor.ops[before:] == ["begin"]  # it has all of it
        assert_serves(server, checkpoints[2], 2, TP)

        # while it is written
        send_chunk, left = RankClients.send_chunk, [2]

        def send_or_kill(self: RankClients, *args: Any) -> None:
            if len(self._sockets) == TP:
                left[0] -= 1
                if not left[0]:
                    kill(self, rank=0)
            send_chunk(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(RankClients, "send_chunk", send_or_kill)
            with pytest.raises(EngineError, match="engine 0: "):
                trainer_bridge.update(tensors[3], [server, survivor], version=3)
        assert states(survivor) == [State.QUARANTINED]
        assert_ended(server)
    trainer_bridge.update(tensors[3], survivor, version=3)
    assert states(survivor) == [State.SERVING] and holds(survivor, checkpoints[3])
