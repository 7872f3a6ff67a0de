"""A trainer on a GPU and engines on other hosts: weights are quantized, and compared with the image
of the last update, on the GPU.

Host memory stands for the GPU's, and torch for the kernels: ``tests/gpu/test_delta.py`` has these.
"""

from typing import Any

import pytest
import torch

from sgl_fp8rl.ops import weight_quant_triton
from sgl_fp8rl.protocol.states import State
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.sgl_fp8rl.receiver.fake_gpu import FakeDeviceMemory
from tests.trainer_bridge.test_far_engine import IMAGE_BYTES, SMALL, holds, remote_engine, step
from tests.trainer_bridge.test_packer import FakeStatus, compile_in_torch
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.session import transaction
from trainer_bridge.session.kept import KEPT
from trainer_bridge.transfer.packer import QuantizePacker
from trainer_bridge.transport import bucket
from trainer_bridge.updates.update import update
from trainer_bridge.ways.changes import Changes

pytestmark = pytest.mark.timeout(120)


class Memory(FakeDeviceMemory):
    """Of the driver; a ``weakref.finalize`` closes it."""

    made: list["Memory"] = []  # noqa: RUF012  (of one test)

    def __init__(self, nbytes: int, device: int | None) -> None:
        super().__init__(nbytes, device)
        self.made.append(self)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's."""
    monkeypatch.setattr(Memory, "made", [])
    monkeypatch.setattr(bucket, "DeviceMemory", Memory)
    monkeypatch.setattr(transaction, "gpu_of", lambda named, layout: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(weight_quant_triton, "compile_descriptors", compile_in_torch)
    monkeypatch.setattr(weight_quant_triton, "Status", FakeStatus)


def packers(engine: FakeEngine) -> list[type]:
    sender = KEPT.connection_to(engine).sender
    assert sender is not None and sender._packer is not None
    return [type(sender._packer[2])]


@pytest.mark.guarantee("all-or-none", fault="a trainer on a GPU, engines on other hosts")
@pytest.mark.parametrize("image_bytes", [0, IMAGE_BYTES])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_quantized_on_the_gpu_is_what_engines_hold(
    tp: int, stream: bool, image_bytes: int
) -> None:
    engine = remote_engine(tp, SMALL, image_bytes)
    tensors = toy.checkpoint(0)
    for version in range(4):
        tensors = step(tensors, version)
        named: Any = iter(tensors.items()) if stream else tensors
        result = update(named, engine, version=version)
        assert holds(engine, tensors) and result.mapped_bytes == 0
        if version == 0:
            assert result.network_bytes >= result.bytes
    is_delta = result.network_bytes < 0.1 * result.bytes
    assert is_delta == bool(image_bytes)
    assert packers(engine) == [QuantizePacker]
    used = [memory for memory in Memory.made if not memory.closed]
    assert len(used) == 1, "one bucket, which is kept"


def test_an_update_that_does_not_commit_leaves_the_image() -> None:
    """NaN is found when all is sent, and before engines write the first byte."""
    engine = remote_engine(1, SMALL, IMAGE_BYTES)
    tensors = toy.checkpoint(0)
    for version in range(3):
        update(step(tensors, version), engine, version=version)
    kept = KEPT.connection_to(engine).base
    bad = {name: tensor.clone() for name, tensor in step(tensors, 3).items()}
    bad[toy.FP8_NAMES[0]].view(-1)[0] = torch.nan
    with pytest.raises(EngineError, match="NaN"):
        update(bad, engine, version=3)
    assert {weights.state for weights in engine.ranks} == {State.SERVING}, "nothing was written"
    assert KEPT.connection_to(engine).base == kept
    result = update(step(tensors, 4), engine, version=4)
    assert holds(engine, step(tensors, 4))
    assert result.network_bytes < 0.1 * result.bytes


def test_an_image_that_the_gpu_has_no_room_for_fails_no_update(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = remote_engine(1, SMALL, IMAGE_BYTES)
    tensors = toy.checkpoint(0)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    update(tensors, engine, version=0)
    with monkeypatch.context() as patch:
        patch.setattr(Changes, "commit", full)
        update(step(tensors, 1), engine, version=1)
    assert holds(engine, step(tensors, 1)) and KEPT.connection_to(engine).base is None
    assert "--fp8rl-image-bytes" in caplog.text
    for version in (2, 3):
        result = update(step(tensors, version), engine, version=version)
        assert holds(engine, step(tensors, version))
    assert result.network_bytes < 0.1 * result.bytes


def test_several_engines_of_which_one_lacks_the_image() -> None:
    engines = [remote_engine(1, SMALL, IMAGE_BYTES) for _ in range(2)]
    tensors = toy.checkpoint(0)
    for version in range(3):
        update(step(tensors, version), engines[:1], version=version)
    for version in range(3, 6):
        result = update(step(tensors, version), engines, version=version)
        assert all(holds(engine, step(tensors, version)) for engine in engines)
    assert result.network_bytes < 0.2 * result.bytes
