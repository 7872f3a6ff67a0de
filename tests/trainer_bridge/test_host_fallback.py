"""GPU memory that the engine cannot open: the update goes through host memory, and so do the next.

The ranks' driver is a fake that refuses; sockets, sessions and the host bucket are real.
"""

import ctypes
import logging
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sgl_fp8rl.protocol import cuda_driver, cuda_memory
from sgl_fp8rl.protocol.cuda_memory import Handle
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver.writers.shared_memory import Bucket, SharedMemory, SharedMemoryError
from tests.sgl_fp8rl.protocol.test_cuda_memory import GPU, FakeDriver
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.sgl_fp8rl.receiver.fake_gpu import FakeDeviceMemory
from tests.trainer_bridge.test_update import engine_of, holds
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.session import transaction
from trainer_bridge.session.kept import KEPT
from trainer_bridge.transfer.layout import comparable
from trainer_bridge.transport.cuda_ipc import placement_of
from trainer_bridge.updates.update import update
from trainer_bridge.ways import carriers
from trainer_bridge.ways import sender as sender_module
from trainer_bridge.ways.sender import Sender

pytestmark = pytest.mark.timeout(120)

TP = 2
NO_PEER_ACCESS = 217  # CUDA_ERROR_PEER_ACCESS_UNSUPPORTED
NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED
OPEN = "cuIpcOpenMemHandle_v2"


class GpuEngine(FakeEngine):
    """Its ranks open memory as ranks on GPUs do; their weights are in host memory."""

    def __init__(self) -> None:
        super().__init__(engine_of(TP).ranks)
        self.told["gpus"] = [GPU] * TP
        for weights in self.ranks:
            weights.memory = SharedMemory(torch.device("cuda", 0))
        self.states_at_end: list[list[State]] = []
        """States of the ranks at the end of each session."""

    def control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
        reply = super().control(message)
        if message["op"] == "end":
            self.states_at_end.append([weights.state for weights in self.ranks])
        return reply


class PlainMemory(FakeDeviceMemory):
    """Memory of the trainer's GPU, as far as ranks hear of it."""

    def handle(self) -> Handle:
        return Handle("ab" * 64, self.tensor.numel(), GPU)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """The CUDA driver of trainer and ranks; host memory stands in for the trainer's GPU."""
    fake = FakeDriver()
    caches = cuda_driver.driver, cuda_driver.library, cuda_driver.primary_context
    for cache in (*caches, cuda_memory.gpu_uuid):
        cache.cache_clear()
    fake._cuDeviceGet = lambda ordinal, device: None  # type: ignore[method-assign]  # any is GPU 0
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    monkeypatch.setattr(transaction, "gpu_of", lambda named, layout: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(sender_module, "can_be_mapped", lambda tensor: True)
    monkeypatch.setattr(carriers, "DeviceMemory", PlainMemory)
    yield fake
    for cache in (*caches, cuda_memory.gpu_uuid):
        cache.cache_clear()


@pytest.mark.parametrize(
    ("call", "error", "sessions", "opened"),
    [
        pytest.param(OPEN, NO_PEER_ACCESS, 4, TP, id="no rank can open it"),
        # known before a session begins
        pytest.param("cuIpcGetMemHandle", NOT_SUPPORTED, 3, 0, id="the trainer cannot export it"),
    ],
)
def test_a_bucket_that_cannot_be_shared(
    call: str,
    error: int,
    sessions: int,
    opened: int,
    driver: FakeDriver,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first update goes through host memory after a session that wrote nothing, the next ones
    at once; an engine with another GPU is reached through that."""
    engine, other = GpuEngine(), GpuEngine()
    driver.refuse[call] = error
    with caplog.at_level(logging.WARNING, "trainer_bridge"):
        for version in range(3):
            tensors = toy.checkpoint(version)
            result = update(tensors, engine, version=version)
            assert (result.version, result.mapped_bytes) == (version, 0)
            assert holds(engine, tensors)
    sentences = [r.message for r in caplog.records if r.name.startswith("trainer_bridge")]
    assert len(sentences) == 1 and "host memory" in sentences[0]
    assert engine.states_at_end == [[State.SERVING] * TP] * sessions
    assert [type(weights.memory.bucket) for weights in engine.ranks] == [Bucket] * TP
    assert driver.calls.count(OPEN) == opened
    update(toy.checkpoint(), other, version=0)
    assert driver.calls.count(OPEN) == 2 * opened


def test_parameters_that_one_rank_cannot_open(driver: FakeDriver) -> None:
    """The other rank lets go of what it opened."""
    engine, tensors = GpuEngine(), toy.checkpoint()
    connection = KEPT.connection_to(engine)
    layout = connection.layout()
    gpus = {"gpus": sorted({*layout["gpus"]}), "visible_gpus": []}
    sender = Sender({**comparable(layout, through_host=False, is_remote=False), **gpus})
    vars(sender.parameters)["_placement"] = placement_of([*tensors.values()])
    connection.use(sender)
    opened = driver._cuIpcOpenMemHandle_v2

    def open_once(address: Any, handle: Any, flags: int) -> int | None:
        if driver.calls.count(OPEN) > 1:
            return NO_PEER_ACCESS
        return opened(address, handle, flags)

    driver._cuIpcOpenMemHandle_v2 = open_once  # type: ignore[assignment,method-assign]
    result = update(tensors, engine, version=0)
    assert (result.mapped_bytes, holds(engine, tensors)) == (0, True)
    assert driver.calls.count("cuIpcCloseMemHandle") == 1
    assert engine.states_at_end == [[State.SERVING] * TP] * 2
    update(toy.checkpoint(1), engine, version=1)
    assert len(engine.states_at_end) == 3


def test_host_memory_that_cannot_be_opened_either(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = Mock(side_effect=SharedMemoryError("no host memory either"))
    monkeypatch.setattr(Bucket, "from_descriptor", refuse)
    driver.refuse[OPEN] = NO_PEER_ACCESS
    engine = GpuEngine()
    with pytest.raises(EngineError, match="no host memory either"):
        update(toy.checkpoint(), engine, version=0)
    assert engine.states_at_end == [[State.SERVING] * TP] * 2
    assert [weights.memory.known() for weights in engine.ranks] == [[], []]
