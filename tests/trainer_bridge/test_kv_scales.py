"""KV scales on their way through ``update``: real transport and sockets, ranks that note it all."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from sgl_fp8rl.protocol.kv_schema import E4M3, INT8, KV_SCALES
from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.receiver.kv import kv_stats
from sgl_fp8rl.receiver.kv.scales import Heads, KVScales
from tests.trainer_bridge.fake_rank import LAYOUT, TOKEN, Rank
from tests.trainer_bridge.test_fsdp import failure, run
from trainer_bridge.kv.kv_calibrator import KVCalibrator
from trainer_bridge.session.kept import KEPT
from trainer_bridge.updates.update import update

pytestmark = pytest.mark.timeout(60)

LAYERS, KV_HEADS = 2, 3
KV_CACHE: Any = kv_stats.layout(KVScales(LAYERS, Heads.of(KV_HEADS, 0, 1), "engine", "cpu"))
"""As an engine says it; of INT8 with another format."""


class Engine:
    """One that reads chunks and keeps the manifest of each update."""

    def __init__(self, folder: Path, sessions: int, **layout: Any) -> None:
        self.rank = Rank(folder, sessions=sessions)
        self.layout = {**LAYOUT, "bucket_bytes": 4096, **layout}
        self.manifests: list[dict[str, Any]] = []

    def control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
        if message["op"] == "layout":
            return dict(self.layout)
        if message["op"] == "tensors":
            shapes = {name: list(tensor.shape) for name, tensor in WEIGHTS.items()}
            return {"shapes": shapes}
        if message["op"] == "begin":
            if "manifest" not in message:
                return {"unknown": True}
            self.manifests.append(message["manifest"]["tensors"])
            return {"sockets": [self.rank.path], "token": TOKEN}
        return {}

    def received(self, update: int) -> torch.Tensor:
        """The KV scales of one update of a single chunk, where they lie behind the weights."""
        sender = KEPT.connection_to(self).sender
        assert sender is not None
        plans = sender._plans.values()
        slices = (part for _, plan in plans for chunk in plan.chunks for part in chunk)
        (offset,) = (part.offset for part in slices if part.name == KV_SCALES)
        raw = self.rank.chunks[update][offset:][: 4 * LAYERS * 2 * KV_HEADS]
        return torch.frombuffer(bytearray(raw), dtype=torch.float32).view(LAYERS, 2, KV_HEADS)


def scales(seed: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.rand(LAYERS, 2, KV_HEADS, generator=made) + 0.01


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path, 3, kv_cache=KV_CACHE)
    yield engine
    engine.rank.join()


WEIGHTS = {"a": torch.ones(4, 4, dtype=torch.bfloat16), "b": torch.ones(3)}


@pytest.mark.parametrize("streamed", [False, True])
def test_they_come_behind_the_weights_bit_for_bit(streamed: bool, engine: Engine) -> None:
    """In FP32: BF16, the control, is another number. Other tensors are sent in the engine's
    dtype."""
    for step in range(3):
        sent = scales(step)
        weights: Any = iter(WEIGHTS.items()) if streamed else WEIGHTS
        result = update(weights, engine, version=step, kv_scales=sent)
        assert result.bytes == 32 + 6 + 4 * LAYERS * 2 * KV_HEADS
        assert not torch.equal(sent.bfloat16().float(), sent)
        if step or not streamed:  # the plan of a first stream, made as tensors came, is not kept
            assert torch.equal(engine.received(step), sent)
        if not streamed:
            assert list(engine.manifests[step]) == ["a", "b", KV_SCALES]
            assert engine.manifests[step][KV_SCALES] == ["float32", [LAYERS, 2, KV_HEADS]]


def test_a_strided_view_with_a_gradient_will_do(engine: Engine) -> None:
    """And without scales nothing of them is sent."""
    sent = scales(0).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    for version in range(2):
        update(WEIGHTS, engine, version=version, kv_scales=sent)
        assert torch.equal(engine.received(version), sent.detach())
    result = update(WEIGHTS, engine, version=2)
    assert list(engine.manifests[2]) == ["a", "b"]
    assert (result.tensors, result.bytes) == (2, 32 + 6)


def test_an_engine_without_an_e4m3_kv_cache_refuses_before_anything_begins(tmp_path: Path) -> None:
    engine = Engine(tmp_path, 1)
    for kv_cache, sentence in (
        (None, "--kv-cache-dtype fp8_e4m3"),
        ({**KV_CACHE, "format": INT8}, "INT8 cache needs no scales; update it without"),
        ({**KV_CACHE, "layers": LAYERS + 1}, r"\(\d+, 2, \d+\).*\(\d+, 2, \d+\)"),
    ):
        engine.layout["kv_cache"] = kv_cache
        with pytest.raises(ManifestError, match=sentence):
            update(WEIGHTS, engine, version=0, kv_scales=scales(0))
        assert engine.manifests == []
    engine.layout["kv_cache"] = {**KV_CACHE, "format": E4M3}
    update(WEIGHTS, engine, version=0, kv_scales=scales(0))
    assert torch.equal(engine.received(0), scales(0))
    engine.rank.join()


# -- FSDP2


def sharded_update(rank: int, folder: Path) -> None:
    """Calibrated together, sent by rank 0; refused on both."""
    engine = Engine(folder, 2, kv_cache=KV_CACHE) if rank == 0 else None
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model)

    calibrator = KVCalibrator(LAYERS, KV_HEADS)
    made = torch.Generator().manual_seed(rank)
    for layer in range(LAYERS):
        calibrator.observe(layer, *torch.randn(2, 1, KV_HEADS, 5, 8, generator=made))
    sent = calibrator.scales()
    update(model, engine, version=0, kv_scales=sent)
    assert engine is None or torch.equal(engine.received(0), sent)
    # only rank 0's count, so the others need not have them
    update(model, engine, version=1, kv_scales=sent if rank == 0 else None)
    assert engine is None or torch.equal(engine.received(1), sent)

    found = failure(lambda: update(model, engine, version=2, kv_scales=sent[:1]))
    assert found[0] == "ManifestError" and "has shape (1, 2, 3)" in found[1]
    if engine is not None:
        engine.layout["kv_cache"] = None
    found = failure(lambda: update(model, engine, version=2, kv_scales=sent))
    assert found[0] == "ManifestError" and "the engine has none" in found[1]
    if engine is not None:
        assert len(engine.manifests) == 2
        engine.rank.join()


@pytest.mark.timeout(180)
def test_a_sharded_trainer_sends_them_from_rank_0(tmp_path: Path) -> None:
    run(sharded_update, tmp_path)
