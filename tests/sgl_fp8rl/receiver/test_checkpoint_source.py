"""A checkpoint of this process itself: written chunk by chunk, each tensor read once."""

import weakref
from collections.abc import Iterator

import pytest
import torch

from sgl_fp8rl.protocol.manifest import Manifest, describe
from sgl_fp8rl.protocol.policy import CHECKPOINT, Policy
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver.checkpoint_source import write_all
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.toy import BF16, Model, Weights

BLOCK_BYTES = 128 * toy.HEADS * 2
"""128 rows of the widest BF16 matrix of the toy model; FP8 projections are split by it as well."""


@pytest.fixture
def weights() -> EngineWeights:
    return toy.engine(toy.toy(), toy.SHAPES)


def accepted(
    weights: EngineWeights, tensors: toy.Tensors, chunk_bytes: int = BLOCK_BYTES
) -> Manifest:
    specs = describe(tensors.items()).tensors
    manifest = Manifest(specs, chunk_bytes)
    weights.accept(manifest)
    return manifest


@pytest.mark.parametrize("chunk_bytes", [BLOCK_BYTES, toy.CHUNK_BYTES])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_checkpoint_leaves_the_oracles_bytes(tp: int, fp8: bool, chunk_bytes: int) -> None:
    tensors = toy.checkpoint()
    for rank in range(tp):
        weights = toy.engine(toy.toy(rank, tp), toy.SHAPES)
        streamed = tensors
        if fp8:  # scales before their codes: the order of a checkpoint's files is anything
            streamed = dict(sorted(toy.quantized(tensors).items(), reverse=True))
        write_all(weights, accepted(weights, streamed, chunk_bytes), streamed.items())
        assert toy.same(toy.contents(weights.model), toy.expected(tensors, rank, tp))
        assert (weights.state, weights.policy) == (State.SERVING, CHECKPOINT)
        assert (weights.session, weights.memory.known()) == (None, [])
        weights.check_policy(Policy("any", 0))


def test_each_tensor_is_read_once_and_let_go(weights: EngineWeights) -> None:
    """A checkpoint of any size passes through the bucket."""
    tensors = toy.checkpoint()
    streamed = toy.quantized(tensors)
    alive: list[weakref.ref[torch.Tensor]] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in streamed.items():
            held = sum(ref() is not None for ref in alive)
            # the one before may still be bound in the loop; codes wait for their scales
            assert held <= 2, name
            fresh = tensor.clone()
            alive.append(weakref.ref(fresh))
            yield name, fresh
            del fresh

    write_all(weights, accepted(weights, streamed), stream())
    assert len(alive) == len(streamed)
    assert toy.same(toy.contents(weights.model), toy.expected(tensors))


def test_a_scalar_and_what_falls_back_come_through() -> None:
    def load(model: Model, named: Weights) -> None:
        for name, weight in named:
            model.data(name).copy_(weight * 2 if name == "n" else weight)

    shapes: toy.Shapes = {"s": (), "n": (4,)}
    storage = {"s": torch.tensor(9.0), "n": torch.zeros(4, dtype=BF16)}
    weights = toy.engine(Model(storage, load), shapes)
    tensors = {"s": torch.tensor(2.5), "n": torch.arange(4, dtype=BF16)}
    write_all(weights, accepted(weights, tensors, 256), tensors.items())
    assert weights.model.get_parameter("s").item() == 2.5
    assert torch.equal(weights.model.get_parameter("n"), tensors["n"] * 2)
