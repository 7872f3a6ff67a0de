"""Weights that are cut inside of blocks: on every rank the blocks are those of the whole tensor."""

from collections.abc import Iterable
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from sgl_fp8rl.formats import BLOCK_FP8
from sgl_fp8rl.formats.padding import Shard, fit, pad_storage
from sgl_fp8rl.ops.regions import numel, overlap
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from sgl_fp8rl.receiver.routes.route_tracer import record_routes
from sgl_fp8rl.receiver.routes.routes import RouteError
from sgl_fp8rl.receiver.writers import cut_blocks
from tests import oracle
from tests.sgl_fp8rl.receiver import fake_gpu, padded_toy, toy
from tests.sgl_fp8rl.receiver.fake_gpu import Interpreter, Make, in_place

gpu, make = fake_gpu.gpu, fake_gpu.make
SMALL = 128 * 448 * 2 + 256
"""Bytes of a chunk that holds one row of blocks of the widest matrix."""
RANKS = [(0, 1), (0, 2), (1, 2)]
every_rank = pytest.mark.parametrize(("rank", "tp"), RANKS)


def engine(rank: int, tp: int, make: Make = toy.engine) -> EngineWeights:
    return make(padded_toy.toy(rank, tp), padded_toy.SHAPES)


@pytest.mark.parametrize("chunk_bytes", [SMALL, toy.CHUNK_BYTES])
@pytest.mark.parametrize("sent", ["bf16", "fp8"])
@every_rank
def test_an_update_leaves_the_oracles_bytes(
    make: Make, rank: int, tp: int, sent: str, chunk_bytes: int
) -> None:
    weights = engine(rank, tp, make)
    for version in range(2):
        tensors = padded_toy.checkpoint(version)
        streamed = tensors if sent == "bf16" else padded_toy.quantized(tensors)
        toy.lose(weights.model)  # padding comes back with memory
        toy.update(weights, streamed, version, chunk_bytes)
        assert toy.same(toy.contents(weights.model), padded_toy.expected(tensors, rank, tp))


def test_the_comparison_tells_ranks_and_wrong_blocks_apart() -> None:
    weights, tensors = engine(1, 2), padded_toy.checkpoint()
    toy.update(weights, tensors)
    found = toy.contents(weights.model)
    other = padded_toy.expected(tensors, 0, 2)
    assert not any(np.array_equal(found[name], other[name]) for name in found if name != "norm")
    # the control: a rank that quantizes its rows by themselves
    _, scales = oracle.quantize_weight(tensors["q"][224:].float().numpy())
    stored = weights.model.get_parameter("qk_scale_inv").data.numpy()
    assert not np.array_equal(stored[: len(scales)], scales)


@pytest.mark.parametrize("rows", [1 << 20, 128, 64, 200, 3])
@pytest.mark.parametrize("sent", ["bf16", "fp8"])
@every_rank
def test_shards_are_read_where_they_lie(
    rank: int,
    tp: int,
    sent: str,
    rows: int,
    gpu: Interpreter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cut_blocks, "JOINED_BYTES", 256 * 1024)
    weights, tensors = engine(rank, tp, partial(fake_gpu.engine, gpu)), padded_toy.checkpoint()
    streamed = tensors if sent == "bf16" else padded_toy.quantized(tensors)
    session = toy.begin(weights, streamed, chunk_bytes=1 << 18, mapped=streamed)
    weights.memory.segments = in_place(gpu, streamed, 64, rows, 1 << 22)
    toy.write(session, streamed)
    session.finish()
    weights.commit()
    assert toy.same(toy.contents(weights.model), padded_toy.expected(tensors, rank, tp))


@every_rank
def test_recording_moves_nothing(rank: int, tp: int) -> None:
    model = padded_toy.toy(rank, tp)

    def storage() -> dict[str, tuple[int, torch.Size]]:
        return {name: (p.data_ptr(), p.shape) for name, p in model.named_parameters()}

    before, held = storage(), toy.contents(model)
    table = record_routes(model, padded_toy.SHAPES)
    assert storage() == before and toy.same(toy.contents(model), held)
    for name, parameter in model.named_parameters():
        boxes = [r.dst for routes in table.routes.values() for r in routes if r.parameter == name]
        boxes += [region for constant, region, _ in table.constants if constant == name]
        if not name.endswith("_scale_inv"):  # which follow their codes
            assert sum(map(numel, boxes)) == parameter.numel() and not overlap(boxes)


def test_storage_is_given_back_where_a_loader_fails() -> None:
    model = padded_toy.toy(1, 2)

    def load(model: nn.Module, weights: Iterable[object]) -> None:
        raise AttributeError("no such layer")

    model.loader = load  # type: ignore[assignment]
    shape = model.get_parameter("qk").shape
    with pytest.raises(RouteError, match="no such layer"):
        record_routes(model, padded_toy.SHAPES)
    assert model.get_parameter("qk").shape == shape


def test_a_shard_that_lies_elsewhere_is_refused() -> None:
    """A loader that gives this rank other rows than its storage has the place for."""
    model, other = padded_toy.toy(0, 2), padded_toy.toy(1, 2)
    model.loader = other.loader
    with pytest.raises(RouteError, match=r"cuts a block.*--fp8rl-ragged bf16"):
        record_routes(model, padded_toy.SHAPES)


@pytest.mark.parametrize("rows", [448, 384])
def test_parts_of_one_matrix_begin_with_a_block(rows: int) -> None:
    """A checkpoint that has q and k in one tensor, as Phi-3 has: k lies as it does there."""
    padding, _ = fit(BLOCK_FP8, [Shard(rows), Shard(320)], Shard(256))
    assert padding is not None
    storage = toy.fp8_storage("qk", *padding.shape)

    def load(model: toy.Model, weights: toy.Weights) -> None:
        for _, weight in weights:
            for start, length in ((0, rows), (rows, 320)):
                model.data("qk").narrow(0, start, length).copy_(weight.narrow(0, start, length))

    model = toy.Model(storage, load)
    parameters = (model.get_parameter(name) for name in storage)
    pad_storage(*parameters, padding, BLOCK_FP8.block)
    shapes: toy.Shapes = {"fused": (rows + 320, 256)}
    if rows % 128:
        with pytest.raises(RouteError, match=r"fused -> qk cuts a block.*--fp8rl-ragged bf16"):
            record_routes(model, shapes)
        return
    weights = toy.engine(model, shapes)
    tensors = {"fused": torch.randn(shapes["fused"]).bfloat16()}
    toy.update(weights, tensors)
    codes, scales = oracle.quantize_weight(tensors["fused"].float().numpy())
    assert np.array_equal(model.data("qk").view(torch.uint8).numpy()[: rows + 320], codes)
    assert np.array_equal(model.data("qk_scale_inv").numpy(), scales)
