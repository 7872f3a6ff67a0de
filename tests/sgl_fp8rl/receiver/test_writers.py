"""What an update writes, byte for byte, and which values it refuses: on a CPU in plain torch, and
on a GPU, whose kernels ``fake_gpu.py`` interprets."""

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver.session import Session
from tests.sgl_fp8rl.receiver import fake_gpu, toy
from tests.sgl_fp8rl.receiver.fake_gpu import Make
from tests.sgl_fp8rl.receiver.toy import BF16, BIG, FP8, Model, Weights

gpu, make = fake_gpu.gpu, fake_gpu.make
BLOCK_ROWS = 128 * toy.HEADS
"""Elements of 128 rows of the widest matrix of the toy model."""
BAD = (float("nan"), float("inf"), float("-inf"))


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, FP8])
def test_an_update_leaves_the_oracles_bytes(
    make: Make, dtype: torch.dtype, tp: int, small: bool
) -> None:
    """Also codes and scales leave those of their weights, and constants such as the padding of the
    vocabulary come back: a memory saver that released the weights loses them too."""
    chunk_bytes = toy.CHUNK_BYTES
    if small:
        chunk_bytes = BLOCK_ROWS * dtype.itemsize + (256 if dtype == FP8 else 0)
    for rank in range(tp):
        weights = make(toy.toy(rank, tp), toy.SHAPES)
        for version in range(2):  # the second time from the tables of the first
            tensors = toy.checkpoint(version, dtype=BF16 if dtype == FP8 else dtype)
            sent = toy.quantized(tensors) if dtype == FP8 else tensors
            toy.lose(weights.model)
            toy.update(weights, sent, version, chunk_bytes)
            assert toy.same(toy.contents(weights.model), toy.expected(tensors, rank, tp))
            assert (weights.state, weights.policy.version) == (State.SERVING, version)


def test_the_control_another_checkpoint_leaves_other_bytes(make: Make) -> None:
    weights = make(toy.toy(), toy.SHAPES)
    toy.update(weights, toy.checkpoint(1))
    expected, found = toy.expected(toy.checkpoint(0)), toy.contents(weights.model)
    assert all(not np.array_equal(expected[name], found[name]) for name in expected)


def write_in_any_order(session: Session, tensors: toy.Tensors, random: Random) -> None:
    order = list(range(len(session.writer.chunks)))
    random.shuffle(order)
    for index in order:
        toy.fill(session, tensors, index)
        session.write(index)
    session.finish()
    session.weights.commit()


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("fp8", [False, True])
def test_ragged_blocks_split_anywhere_in_any_order(make: Make, fp8: bool, slots: int) -> None:
    """From 128 rows of 200 BF16 values up to the whole model in one chunk."""
    random, tensors = Random(0), toy.checkpoint(shapes=BIG)
    codes = toy.quantized(tensors, ["w"])
    for version, lines in enumerate([200, 233, 350, 1200, *random.choices(range(200, 1200), k=20)]):
        weights, sent = toy.ragged(make), codes if fp8 else tensors
        size = 256 * (lines // 2 + 1 if fp8 else lines)
        write_in_any_order(toy.begin(weights, sent, version, size, slots=slots), sent, random)
        for name, found in toy.contents(weights.model).items():
            assert found.tobytes() == codes[name].view(torch.uint8).numpy().tobytes(), (name, lines)


EXPERTS: toy.Shapes = {"gate_up": (4, 512, 256), "down": (4, 256, 512), "router": (4, 256)}


def experts(rank: int) -> tuple[Model, Callable[[toy.Tensors], dict[str, NDArray[np.uint8]]]]:
    """Two of four experts, and half of each: rows of one matrix, columns of the other."""
    half = slice(rank * 256, rank * 256 + 256)
    boxes: dict[str, Any] = {
        "gate_up": (slice(2, 4), half),
        "down": (slice(2, 4), slice(None), half),
        "router": (slice(None), slice(128, None)),
    }

    def load(model: Model, named: Weights) -> None:
        for name, weight in named:
            model.data(name).copy_(weight[boxes[name]])

    def expected(tensors: toy.Tensors) -> dict[str, NDArray[np.uint8]]:
        parts = {name: t[boxes[name]].contiguous() for name, t in tensors.items()}
        sent = toy.quantized(parts, ["gate_up", "down"])
        return {name: t.view(torch.uint8).numpy().reshape(-1) for name, t in sent.items()}

    storage = {
        **toy.fp8_storage("gate_up", 2, 256, 256),
        **toy.fp8_storage("down", 2, 256, 256),
        "router": torch.zeros(4, 128, dtype=BF16),
    }
    return Model(storage, load), expected


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("experts_in_a_chunk", [1, 3, 8])
@pytest.mark.parametrize("rank", [0, 1])
def test_experts_in_one_tensor(make: Make, rank: int, experts_in_a_chunk: int, fp8: bool) -> None:
    tensors = toy.checkpoint(shapes=EXPERTS)
    model, expected = experts(rank)
    weights = make(model, EXPERTS)
    sent = toy.quantized(tensors, ["gate_up", "down"]) if fp8 else tensors
    size = experts_in_a_chunk * (512 * 256 * (1 if fp8 else 2) + 256)
    write_in_any_order(toy.begin(weights, sent, chunk_bytes=size), sent, Random(rank))
    assert toy.same(toy.contents(model), expected(tensors))


def test_scalars_columns_and_more_dimensions(make: Make) -> None:
    shapes: toy.Shapes = {
        "scalar": (),
        "column": (64, 4),
        "columns": (3, 64, 4),
        "row": (1, 96),
        "conv": (5, 6, 7, 8),
        "in a stack": (40,),
    }
    parts: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "column": lambda w: w[:, 1:2],
        "columns": lambda w: w[1:, :, 2:3],
        "conv": lambda w: w[1:4, 2:5, :, 3:7],
    }

    def part(name: str, weight: torch.Tensor) -> torch.Tensor:
        return parts.get(name, lambda w: w)(weight)

    def load(model: Model, named: Weights) -> None:
        for name, weight in named:
            target = model.data(name)
            if name == "in a stack":
                target[0].zero_()
                target[2].zero_()
                target = target[1]
            target.copy_(part(name, weight))

    tensors = toy.checkpoint(shapes=shapes, dtype=torch.float32)
    storage = {n: torch.zeros(part(n, t).shape, dtype=BF16) for n, t in tensors.items()}
    storage["in a stack"] = torch.zeros(3, 40)
    model = Model(storage, load)
    toy.update(make(model, shapes), tensors, chunk_bytes=2048)
    for name, tensor in tensors.items():
        found = model.data(name)[1] if name == "in a stack" else model.data(name)
        assert torch.equal(found, part(name, tensor).to(found.dtype)), name


# -- NaN and Inf


@pytest.mark.guarantee("quarantine", fault="an update after a failed one")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "name", ["embed.weight", "attn.v.weight", "mlp.experts.1.down.weight", "norm.weight"]
)
def test_nan_and_inf_are_refused_by_name(make: Make, name: str, dtype: torch.dtype) -> None:
    weights = make(toy.toy(), toy.SHAPES)
    # FP32's largest number is finite, and Inf in BF16
    for bad in (*BAD, *([torch.finfo(dtype).max] if dtype == torch.float32 else ())):
        tensors = toy.checkpoint(dtype=dtype)
        tensors[name].view(-1)[-1] = bad
        tensors["norm.weight"][0] = bad  # the first in the manifest's order is named
        with pytest.raises(ValueError, match=f"{name} holds NaN or Inf"):
            toy.update(weights, tensors, chunk_bytes=2 * BLOCK_ROWS * dtype.itemsize)
        assert weights.session is not None and weights.session.dirty
        assert weights.state is not State.SERVING
        weights.quarantine("it failed")
        assert (weights.state, weights.session) == (State.QUARANTINED, None)
    tensors = toy.checkpoint(1, dtype=dtype)
    # the same writer starts afresh
    toy.update(weights, tensors, chunk_bytes=2 * BLOCK_ROWS * dtype.itemsize)
    assert (weights.state, weights.reason, weights.policy.version) == (State.SERVING, "", 0)
    assert toy.same(toy.contents(weights.model), toy.expected(tensors))


@pytest.mark.parametrize("bad", torch.tensor([0x7F, 0xFF], dtype=torch.uint8).view(FP8))
def test_a_nan_among_codes_is_refused(make: Make, bad: torch.Tensor) -> None:
    streamed = toy.quantized(toy.checkpoint())
    streamed["attn.o.weight"].view(-1)[77] = bad
    with pytest.raises(ValueError, match=r"attn\.o\.weight holds NaN"):
        toy.update(make(toy.toy(), toy.SHAPES), streamed)


@pytest.mark.parametrize("bad", [*BAD, 0.0, -1.0])
def test_a_scale_is_positive_and_finite(make: Make, bad: float) -> None:
    streamed = toy.quantized(toy.checkpoint())
    streamed["attn.k.weight_scale_inv"][1, 0] = bad
    fault = r"attn\.k\.weight_scale_inv holds a scale that is not a positive number"
    with pytest.raises(ValueError, match=fault):
        toy.update(make(toy.toy(), toy.SHAPES), streamed)
