"""Parameters on one GPU that lie elsewhere at each update: the bucket is filled chunk by chunk."""

from typing import Any

import pytest
import torch

from tests.sgl_fp8rl.receiver import toy
from tests.trainer_bridge import fake_ipc
from tests.trainer_bridge.shards_job import GpuEngine
from tests.trainer_bridge.test_update import holds
from trainer_bridge.transfer.packer import QuantizePacker
from trainer_bridge.updates.update import update
from trainer_bridge.ways import sender


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> tuple[fake_ipc.Memories, GpuEngine]:
    """Memory that trainer and engine share, and an engine."""
    memories, interpreter = fake_ipc.install(monkeypatch)
    monkeypatch.setattr(sender, "can_be_mapped", memories.holds)
    return memories, GpuEngine(interpreter.writable)


def moved(memories: fake_ipc.Memories, tensors: toy.Tensors, shift: int = 0) -> toy.Tensors:
    """The same values in new memory, so many bytes behind its start."""
    found = {}
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        content = memories.allocate(raw.numel() + shift)[shift:]
        found[name] = content.copy_(raw).view(tensor.dtype).view(tensor.shape)
    return found


def refuse(*_: Any) -> None:
    raise AssertionError("a parameter was put in by itself")


def test_no_parameter_is_put_in_by_itself(
    shared: tuple[fake_ipc.Memories, GpuEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    memories, engine = shared
    engine.bucket_bytes = 1 << 17
    monkeypatch.setattr(QuantizePacker, "put", refuse)
    for version in range(3):
        tensors = toy.checkpoint(version)
        result = update(moved(memories, tensors), engine, version=version)
        assert holds(engine, tensors)
        assert result.mapped_bytes == 0
    writer = list(engine.ranks[0]._writers.values())[-1]
    assert len(writer.chunks) > 4

    bad = toy.checkpoint(3)
    bad["mlp.experts.1.up.weight"][-1, -1] = torch.nan
    with pytest.raises(Exception, match=r"experts\.1\.up\.weight holds NaN"):
        update(moved(memories, bad), engine, version=3)
    update(moved(memories, tensors), engine, version=4)
    assert holds(engine, tensors)


def test_what_does_not_lie_as_it_is_sent_is_put_in_by_itself(
    shared: tuple[fake_ipc.Memories, GpuEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the control of the test above: the calls that it refuses are made here."""
    memories, engine = shared
    tensors = toy.checkpoint(0)
    update(moved(memories, tensors, shift=4), engine, version=0)  # not aligned
    assert holds(engine, tensors)
    mixed = moved(memories, tensors)
    mixed["norm.weight"] = mixed["norm.weight"].clone()  # memory that is not shared
    update(mixed, engine, version=1)
    assert holds(engine, tensors)
    monkeypatch.setattr(QuantizePacker, "put", refuse)
    with pytest.raises(AssertionError, match="by itself"):
        update(moved(memories, tensors, shift=4), engine, version=2)
