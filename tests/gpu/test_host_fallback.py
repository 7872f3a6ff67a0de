"""What an engine opens of a trainer's GPU memory: nothing where it cannot, and no longer than the
trainer lives.
"""

import json
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import trainer_bridge
from sgl_fp8rl.protocol.cuda_memory import Handle
from tests.engine.harness import Server
from tests.engine.serving import version_of
from tests.gpu.engines import (
    BUCKET_BYTES,
    digest_of,
    nbytes_of,
    sha256,
    start_server,
    update,
    used_bytes,
)
from tests.gpu.policies import DENSE, draw, reference_digests, shared_folder, write_checkpoint
from tests.gpu.test_cuda_memory import MIB, new_peer
from tests.gpu.test_updates import RECLAIM_S
from tests.gpu.trainers import Trainer, answer, trainer_process
from trainer_bridge.updates.update import RUN

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with shared_folder() as folder:
        checkpoint = write_checkpoint(DENSE, draw(DENSE, 0), folder / "0")
        with start_server(tmp_path_factory.mktemp("fallback") / "server.log", checkpoint) as server:
            yield server


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every handle that this process sends is of a process that died: no driver opens it."""
    with new_peer() as other:
        handle = json.loads(other.call("allocate_and_export", 4 * MIB))
        other.kill()
    monkeypatch.setattr(Handle, "to_json", lambda self: handle)


def update_and_stay(connection: Connection, address: str, version: int, run: str) -> None:
    """Be read in place, and do nothing from then on."""
    tensors = draw(DENSE, 1)
    for step in (version, version + 1):
        result = trainer_bridge.update(tensors, address, version=step, run=run)
    connection.send(result.mapped_bytes)
    threading.Event().wait()


@pytest.mark.guarantee("memory", fault="GPU memory that the engine cannot open")
@pytest.mark.parametrize("updates_before", [0, 1], ids=["bucket", "mapped"])
def test_memory_that_the_engine_cannot_open(
    server: Server, updates_before: int, request: pytest.FixtureRequest
) -> None:
    trainer, wanted = Trainer(DENSE), version_of(server)
    for _ in range(updates_before):  # the next one would be read in place
        update(server, trainer.become(draw(DENSE, 3)))
        wanted += 1
    request.getfixturevalue("stale")
    for policy in (1, 2):
        assert update(server, trainer.become(draw(DENSE, policy))).mapped_bytes == 0
        wanted += 1
        assert version_of(server) == wanted
        assert server.control({"op": "layout"})["state"] == "serving"
        assert sha256(digest_of(server)) == reference_digests(draw(DENSE, policy))
    assert server.process.poll() is None
    trainer_bridge.close(server)


def test_a_closed_connection_begins_anew(server: Server) -> None:
    """The GPU is tried again, and its memory is free once ``close`` returns."""
    trainer = Trainer(DENSE)
    for policy in (1, 2):
        result = update(server, trainer.become(draw(DENSE, policy)))
    assert result.mapped_bytes > 0
    held = nbytes_of(digest_of(server))
    trainer_bridge.close(server)
    torch.cuda.empty_cache()
    before = used_bytes()
    del trainer
    torch.cuda.empty_cache()
    assert before - used_bytes() > held // 2  # BF16: the trainer held more than the engine does


@pytest.mark.guarantee("memory", fault="a trainer killed between two updates")
def test_a_trainer_that_died_between_updates(server: Server) -> None:
    """An idle engine unmaps its parameters, so that they are free for the next trainer."""
    trainer_bridge.close(server)
    before = used_bytes()
    version = version_of(server) + 1
    # of this process's run, or its own next update would be refused
    arguments = (update_and_stay, server.address, version, RUN)
    with trainer_process(*arguments) as (process, connection):
        mapped = answer(connection)
        assert mapped > 0
        assert used_bytes() > before + mapped  # the control: they are seen while it lives
        process.kill()
        process.join()
    deadline = time.monotonic() + RECLAIM_S
    while used_bytes() >= before + BUCKET_BYTES and time.monotonic() < deadline:
        time.sleep(0.1)  # nothing tells when the driver is done
    assert used_bytes() < before + BUCKET_BYTES
    assert sha256(digest_of(server)) == reference_digests(draw(DENSE, 1))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_gpu_that_the_engine_does_not_see(tmp_path: Path) -> None:
    """As under Ray, which gives each process GPUs of its own."""
    with shared_folder() as folder:
        checkpoint = write_checkpoint(DENSE, draw(DENSE, 0), folder / "0")
        environment = {"CUDA_VISIBLE_DEVICES": "1"}
        with start_server(tmp_path / "server.log", checkpoint, environment) as server:
            trainer = Trainer(DENSE)
            for policy in (1, 2):
                update(server, trainer.become(draw(DENSE, policy)))
                assert sha256(digest_of(server)) == reference_digests(draw(DENSE, policy))
