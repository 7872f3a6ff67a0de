"""What the chunks of an update write, byte for byte, and which chunks are refused."""

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from sgl_fp8rl.receiver.session import Session, SessionError
from sgl_fp8rl.receiver.writers.shared_memory import Bucket
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.toy import BF16, BIG, FP8, Model, Weights, begin, ragged, update

BLOCK_ROWS = 128 * toy.HEADS
"""Elements of 128 rows of the widest matrix of the toy model."""


@pytest.fixture
def weights() -> EngineWeights:
    return toy.engine(toy.toy(), toy.SHAPES)


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_update_leaves_the_oracles_bytes(dtype: torch.dtype, tp: int, small: bool) -> None:
    tensors = toy.checkpoint(dtype=dtype)
    chunk_bytes = BLOCK_ROWS * dtype.itemsize if small else toy.CHUNK_BYTES
    for rank in range(tp):
        weights = toy.engine(toy.toy(rank, tp), toy.SHAPES)
        update(weights, tensors, chunk_bytes=chunk_bytes)
        assert toy.same(toy.contents(weights.model), toy.expected(tensors, rank, tp))
        assert (weights.state, weights.policy.version) == (State.SERVING, 0)


@pytest.mark.parametrize("chunk_bytes", [BLOCK_ROWS + 256, toy.CHUNK_BYTES])
@pytest.mark.parametrize("tp", [1, 2])
def test_codes_and_scales_leave_the_same_bytes_as_their_weights(tp: int, chunk_bytes: int) -> None:
    tensors = toy.checkpoint()
    for rank in range(tp):
        weights = toy.engine(toy.toy(rank, tp), toy.SHAPES)
        update(weights, toy.quantized(tensors), chunk_bytes=chunk_bytes)
        assert toy.same(toy.contents(weights.model), toy.expected(tensors, rank, tp))


def test_the_control_another_checkpoint_leaves_other_bytes(weights: EngineWeights) -> None:
    update(weights, toy.checkpoint(1))
    expected, found = toy.expected(toy.checkpoint(0)), toy.contents(weights.model)
    assert all(not np.array_equal(expected[name], found[name]) for name in expected)


def write_in_any_order(session: Session, tensors: toy.Tensors, random: Random) -> None:
    order = list(range(len(session.writer.chunks)))
    random.shuffle(order)
    for index in order:
        toy.fill(session, tensors, index)
        session.write(index)
    session.finish()


@given(st.integers(200, 1200), st.booleans(), st.integers(1, 2), st.randoms(use_true_random=False))
def test_parts_of_any_size_in_any_order_leave_the_same_bytes(
    lines: int, fp8: bool, slots: int, random: Random
) -> None:
    """From 128 rows of 200 BF16 values up to the whole model in one chunk."""
    tensors = toy.checkpoint(shapes=BIG)
    whole, split = ragged(), ragged()
    update(whole, tensors)
    if fp8:
        data = whole.model
        tensors |= {"w": data.data("w"), "w_scale_inv": data.data("w_scale_inv")}  # type: ignore[operator]
        lines = lines // 2 + 1
    session = begin(split, tensors, chunk_bytes=256 * lines, slots=slots)
    write_in_any_order(session, tensors, random)
    assert toy.same(toy.contents(whole.model), toy.contents(split.model))


def copy_all(model: Model, named: Weights) -> None:
    for name, weight in named:
        model.data(name).copy_(weight)


def test_scales_are_split_with_their_codes() -> None:
    """Wherever the manifest names them."""
    shapes: toy.Shapes = {"w": (300, 200)}
    codes = torch.randint(0, 0x7F, (300, 200), dtype=torch.uint8).view(FP8)
    tensors = {"w_scale_inv": torch.rand(3, 2) + 0.5, "w": codes}
    for stream in (tensors, dict(reversed(tensors.items()))):
        weights = toy.engine(Model(toy.fp8_storage("w", 300, 200), copy_all), shapes)
        session = begin(weights, stream, chunk_bytes=128 * 200 + 256)
        assert [[(p.name, p.rows) for p in chunk] for chunk in session.writer.chunks] == [
            [("w", (0, 128)), ("w_scale_inv", (0, 1))],
            [("w", (128, 256)), ("w_scale_inv", (1, 2))],
            [("w", (256, 300)), ("w_scale_inv", (2, 3))],
        ]
        write_in_any_order(session, stream, Random(1))
        found = toy.contents(weights.model)
        for name, tensor in tensors.items():
            assert found[name].tobytes() == tensor.view(torch.uint8).numpy().tobytes()


def test_experts_in_one_tensor_are_split_by_expert() -> None:
    def load(model: Model, named: Weights) -> None:
        for name, weight in named:
            model.data(name).copy_(weight[2:4])  # this rank's experts

    shapes: toy.Shapes = {"w": (4, 128, 256)}
    tensors = {"w": torch.randn(4, 128, 256).to(BF16)}
    whole, split = (
        toy.engine(Model(toy.fp8_storage("w", 2, 128, 256), load), shapes) for _ in range(2)
    )
    update(whole, tensors)
    session = begin(split, tensors, chunk_bytes=128 * 256 * 2)
    assert [[p.rows for p in chunk] for chunk in session.writer.chunks] == [
        [(expert, expert + 1)] for expert in range(4)
    ]
    write_in_any_order(session, tensors, Random(0))
    assert toy.same(toy.contents(whole.model), toy.contents(split.model))


def test_a_scalar_is_written() -> None:
    weights = toy.engine(Model({"s": torch.tensor(9.0)}, copy_all), {"s": ()})
    update(weights, {"s": torch.tensor(2.5)})
    assert weights.model.get_parameter("s").item() == 2.5


# -- what a session refuses


def begin_split(weights: EngineWeights, tensors: toy.Tensors) -> Session:
    """Five chunks of 128 rows of ``w``, the last with ``norm``."""
    session = begin(weights, tensors, chunk_bytes=128 * 200 * 2)
    assert [[(p.name, p.rows) for p in chunk] for chunk in session.writer.chunks] == [
        *([("w", (start, start + 128))] for start in range(0, 512, 128)),
        [("w", (512, 600)), ("norm", (0, 300))],
    ]
    return session


@pytest.mark.parametrize("index", [-1, 5, 2**70, 0.5, "0", None])
def test_a_chunk_that_there_is_not_is_refused_before_anything_is_written(index: int) -> None:
    weights = ragged()
    before = toy.contents(weights.model)
    session = begin_split(weights, toy.checkpoint(shapes=BIG))
    with pytest.raises(SessionError, match=f"chunk {index!r} is not awaited"):
        session.write(index)
    assert not session.dirty
    assert toy.same(before, toy.contents(weights.model))


def test_a_chunk_that_comes_twice_is_refused() -> None:
    weights, tensors = ragged(), toy.checkpoint(shapes=BIG)
    session = begin_split(weights, tensors)
    session.write(1)
    with pytest.raises(SessionError, match="chunk 1 is not awaited"):
        session.write(1)
    for index in (0, 2, 3, 4):
        toy.fill(session, tensors, index)
        session.write(index)
    session.finish()


def test_a_chunk_without_a_bucket_is_refused_before_anything_is_written() -> None:
    weights, tensors = ragged(), toy.checkpoint(shapes=BIG)
    before = toy.contents(weights.model)
    session = begin_split(weights, tensors)
    bucket, weights.memory.bucket = weights.memory.bucket, None
    with pytest.raises(ValueError, match="open the bucket first"):
        session.write(0)
    assert bucket is not None
    weights.memory.bucket = Bucket("short", bucket.content[: 2 * 128 * 200 * 2 - 1])
    with pytest.raises(ValueError, match="holds 102399 bytes, its slots need 102400"):
        session.write(0)
    assert not session.dirty
    assert toy.same(before, toy.contents(weights.model))
    weights.memory.bucket = bucket
    session.write(0)
    assert session.dirty


@pytest.mark.parametrize(("left_out", "missing"), [(0, "w"), (3, "w"), (4, "w")])
def test_what_is_missing_is_named(left_out: int, missing: str) -> None:
    tensors = toy.checkpoint(shapes=BIG)
    session = begin_split(ragged(), tensors)
    for index in {*range(5)} - {left_out}:
        toy.fill(session, tensors, index)
        session.write(index)
    with pytest.raises(SessionError, match=f"1 of 5 chunks are missing, {missing} among them"):
        session.finish()
    assert not session.finished
    toy.fill(session, tensors, left_out)
    session.write(left_out)
    session.finish()
    assert session.finished


def test_nothing_is_written_after_finish() -> None:
    tensors = toy.checkpoint(shapes=BIG)
    session = begin_split(ragged(), tensors)
    toy.write(session, tensors)
    session.finish()
    with pytest.raises(SessionError, match="chunk 0 is not awaited"):
        session.write(0)


# -- NaN and Inf


NAN_CODES = torch.tensor([0x7F, 0xFF], dtype=torch.uint8).view(FP8)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["attn.v.weight", "mlp.experts.1.down.weight", "norm.weight"])
def test_nan_and_inf_are_refused(
    weights: EngineWeights, name: str, dtype: torch.dtype, bad: float
) -> None:
    tensors = toy.checkpoint(dtype=dtype)
    tensors[name].view(-1)[-1] = bad
    session = begin(weights, tensors)
    with pytest.raises(ValueError, match=f"{name}.*NaN or Inf"):
        toy.write(session, tensors)
    assert session.dirty
    assert weights.state is not State.SERVING


@pytest.mark.parametrize("name", ["attn.v.weight", "norm.weight"])
def test_a_value_that_overflows_in_the_engines_dtype_is_refused(
    weights: EngineWeights, name: str
) -> None:
    """FP32's largest number is finite, and Inf in BF16."""
    tensors = toy.checkpoint(dtype=torch.float32)
    tensors[name].view(-1)[0] = torch.finfo(torch.float32).max
    session = begin(weights, tensors)
    with pytest.raises(ValueError, match=f"{name}.*NaN or Inf"):
        toy.write(session, tensors)


@pytest.mark.parametrize("bad", NAN_CODES)
def test_a_nan_among_codes_is_refused(weights: EngineWeights, bad: torch.Tensor) -> None:
    streamed = toy.quantized(toy.checkpoint())
    streamed["attn.o.weight"].view(-1)[77] = bad
    session = begin(weights, streamed)
    with pytest.raises(ValueError, match=r"attn\.o\.weight holds NaN"):
        toy.write(session, streamed)


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (float("nan"), "holds NaN or Inf"),
        (float("inf"), "holds NaN or Inf"),
        (0.0, "not positive"),
        (-1.0, "not positive"),
    ],
)
def test_a_scale_is_positive_and_finite(weights: EngineWeights, bad: float, fault: str) -> None:
    streamed = toy.quantized(toy.checkpoint())
    streamed["attn.k.weight_scale_inv"][1, 0] = bad
    session = begin(weights, streamed)
    with pytest.raises(ValueError, match=rf"attn\.k\.weight_scale_inv.*{fault}"):
        toy.write(session, streamed)
