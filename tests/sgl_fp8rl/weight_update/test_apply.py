"""What the parts of an update write, byte for byte, and which parts are refused."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_fp8rl.weight_update.session import EngineWeights, SessionError, State
from tests.sgl_fp8rl.weight_update import toy
from tests.sgl_fp8rl.weight_update.toy import BF16, BIG, FP8, Model, Weights, begin, ragged, update


@pytest.fixture
def weights() -> EngineWeights:
    return toy.engine(toy.toy(), toy.SHAPES)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_update_leaves_the_oracles_bytes(dtype: torch.dtype, tp: int) -> None:
    tensors = toy.checkpoint(dtype=dtype)
    for rank in range(tp):
        weights = toy.engine(toy.toy(rank, tp), toy.SHAPES)
        update(weights, tensors)
        assert toy.same(toy.contents(weights.model), toy.expected(tensors, rank, tp))
        assert (weights.state, weights.version) == (State.SERVING, 0)


@pytest.mark.parametrize("tp", [1, 2])
def test_codes_and_scales_leave_the_same_bytes_as_their_weights(tp: int) -> None:
    tensors = toy.checkpoint()
    for rank in range(tp):
        weights = toy.engine(toy.toy(rank, tp), toy.SHAPES)
        update(weights, toy.quantized(tensors))
        assert toy.same(toy.contents(weights.model), toy.expected(tensors, rank, tp))


def test_the_control_another_checkpoint_leaves_other_bytes(weights: EngineWeights) -> None:
    update(weights, toy.checkpoint(1))
    expected, found = toy.expected(toy.checkpoint(0)), toy.contents(weights.model)
    assert all(not np.array_equal(expected[name], found[name]) for name in expected)


@given(st.sets(st.integers(1, 4)), st.sets(st.integers(1, 299)), st.booleans(), st.randoms())
def test_parts_in_any_order_leave_the_same_bytes(
    cuts: set[int], vector_cuts: set[int], fp8: bool, random: object
) -> None:
    tensors = toy.checkpoint(shapes=BIG)
    whole, split = ragged(), ragged()
    update(whole, tensors)
    if fp8:
        data = whole.model
        tensors |= {"w": data.data("w"), "w_scale_inv": data.data("w_scale_inv")}  # type: ignore[operator]
    session = begin(split, tensors)
    parts = []
    for name, tensor in tensors.items():
        inner = {"w": [128 * c for c in cuts], "norm": list(vector_cuts)}.get(name, [])
        borders = [0, *sorted(inner), tensor.shape[0]]
        parts += [(name, (a, b)) for a, b in pairwise(borders)]
    random.shuffle(parts)  # type: ignore[attr-defined]
    for name, rows in parts:
        session.write(name, tensors[name][slice(*rows)], rows)
    session.finish()
    assert toy.same(toy.contents(whole.model), toy.contents(split.model))


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
    session = begin(split, tensors)
    for expert in (3, 0, 2, 1):
        session.write("w", tensors["w"][expert : expert + 1], (expert, expert + 1))
    session.finish()
    assert toy.same(toy.contents(whole.model), toy.contents(split.model))


def test_a_scalar_is_written() -> None:
    def load(model: Model, named: Weights) -> None:
        for name, weight in named:
            model.data(name).copy_(weight)

    weights = toy.engine(Model({"s": torch.tensor(9.0)}, load), {"s": ()})
    update(weights, {"s": torch.tensor(2.5)})
    assert weights.model.get_parameter("s").item() == 2.5


# -- what a session refuses


@pytest.mark.parametrize(
    ("name", "tensor", "rows", "fault"),
    [
        ("x", torch.zeros(4, dtype=BF16), None, "x is not awaited"),
        ("w", torch.zeros(600, 200, dtype=torch.float16), None, r"came as torch\.float16"),
        ("w", torch.zeros(600, 200), None, r"came as torch\.float32"),
        ("w", torch.zeros(200, 600, dtype=BF16), None, r"came as .* \(200, 600\)"),
        ("w", torch.zeros(128, 200, dtype=BF16), None, r"came as .* \(128, 200\)"),
        ("w", torch.zeros(128, 100, dtype=BF16), (0, 128), r"came as .* \(128, 100\)"),
        ("w", torch.zeros(256, 200, dtype=BF16), (0, 128), r"rows \(0, 128\) came as"),
        ("w", torch.zeros(128, 200, dtype=BF16), (512, 640), r"rows \(512, 640\) came as"),
        ("w", torch.zeros(128, 200, dtype=BF16), (-128, 0), "came as"),
        ("w", torch.zeros(0, 200, dtype=BF16), (128, 128), "came as"),
        ("w", torch.zeros(128, 200, dtype=BF16), (64, 192), "split matrices at multiples of 128"),
        ("w", torch.zeros(100, 200, dtype=BF16), (0, 100), "split matrices at multiples of 128"),
        ("w", torch.zeros(599, 200, dtype=BF16), (1, 600), "split matrices at multiples of 128"),
    ],
)
def test_a_wrong_part_is_refused_before_it_is_written(
    name: str, tensor: torch.Tensor, rows: tuple[int, int] | None, fault: str
) -> None:
    weights = ragged()
    before = toy.contents(weights.model)
    session = begin(weights, toy.checkpoint(shapes=BIG))
    with pytest.raises(SessionError, match=fault):
        session.write(name, tensor, rows)
    assert not session.dirty
    assert toy.same(before, toy.contents(weights.model))


@pytest.mark.parametrize("again", [(0, 256), (0, 128), (128, 384), (0, 600)])
def test_rows_that_come_twice_are_refused(again: tuple[int, int]) -> None:
    tensors = toy.checkpoint(shapes=BIG)
    session = begin(ragged(), tensors)
    session.write("w", tensors["w"][:256], (0, 256))
    with pytest.raises(SessionError, match="came twice"):
        session.write("w", tensors["w"][slice(*again)], again)
    session.write("w", tensors["w"][256:], (256, 600))


def test_scales_are_not_split() -> None:
    tensors = toy.checkpoint(shapes=BIG)
    codes = {"w": torch.ones(600, 200).to(FP8), "w_scale_inv": torch.ones(5, 2)}
    session = begin(ragged(), {**codes, "norm": tensors["norm"]})
    with pytest.raises(SessionError, match="w_scale_inv is split"):
        session.write("w_scale_inv", torch.ones(3, 2), (0, 3))


@pytest.mark.parametrize("leave_out", [("w", (0, 128)), ("norm", (299, 300)), ("norm", None)])
def test_what_is_missing_is_named(leave_out: tuple[str, tuple[int, int] | None]) -> None:
    tensors = toy.checkpoint(shapes=BIG)
    session = begin(ragged(), tensors)
    missing, rows = leave_out
    for name, tensor in tensors.items():
        if name != missing:
            session.write(name, tensor)
        elif rows is not None:
            for part in [(0, rows[0]), (rows[1], tensor.shape[0])]:
                if part[0] < part[1]:
                    session.write(name, tensor[slice(*part)], part)
    with pytest.raises(SessionError, match=f"1 of 2 tensors are missing .* such as {missing}"):
        session.finish()
    assert not session.finished


def test_nothing_is_written_after_finish() -> None:
    tensors = toy.checkpoint(shapes=BIG)
    session = begin(ragged(), tensors)
    for name, tensor in tensors.items():
        session.write(name, tensor)
    session.finish()
    with pytest.raises(SessionError, match="w is not awaited"):
        session.write("w", tensors["w"])


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
        session.write(name, tensors[name])
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
        session.write(name, tensors[name])


@pytest.mark.parametrize("bad", NAN_CODES)
def test_a_nan_among_codes_is_refused(weights: EngineWeights, bad: torch.Tensor) -> None:
    streamed = toy.quantized(toy.checkpoint())
    streamed["attn.o.weight"].view(-1)[77] = bad
    session = begin(weights, streamed)
    with pytest.raises(ValueError, match=r"attn\.o\.weight holds NaN"):
        session.write("attn.o.weight", streamed["attn.o.weight"])


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
        session.write("attn.k.weight_scale_inv", streamed["attn.k.weight_scale_inv"])
