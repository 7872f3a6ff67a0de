"""``sgl_fp8rl.ops.channel`` against the float64 oracle: byte equality, a GEMM, refusals."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sgl_fp8rl.ops import channel
from sgl_fp8rl.ops.reference import FP8_DTYPE
from tests import oracle

FP32_MAX = torch.finfo(torch.float32).max
ROUNDING = 2e-6
"""Of the product, as a part of the sum of magnitudes: FP32's. Healthy: 2e-7."""
codes_dtype = pytest.mark.parametrize("dtype", [FP8_DTYPE, torch.int8], ids=["fp8", "int8"])


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def raw(codes: torch.Tensor) -> np.ndarray:  # type: ignore[type-arg]
    return np.asarray((codes if codes.dtype == torch.int8 else codes.view(torch.uint8)).numpy())


def assert_bytes(x: torch.Tensor, dtype: torch.dtype) -> None:
    codes, scale = channel.quantize_rows(x, dtype)
    want_codes, want_scale = oracle.quantize_rows(x.float().numpy(), int8=dtype == torch.int8)
    assert scale.dtype is torch.float32 and codes.dtype is dtype
    np.testing.assert_array_equal(scale.numpy(), want_scale)
    np.testing.assert_array_equal(raw(codes), want_codes)


@codes_dtype
@pytest.mark.parametrize(
    "x",
    [
        pytest.param(randn(5, 300), id="random"),
        pytest.param(randn(2, 3, 1), id="one-column"),
        pytest.param(randn(4, 64).half(), id="fp16"),
        pytest.param(torch.zeros(3, 7), id="zero"),
        pytest.param(torch.cat([torch.zeros(1, 7), randn(2, 7)]), id="zero-row"),
        pytest.param(torch.full((2, 3), 1e-45), id="denormal"),
        pytest.param(randn(9, 9) * 1e-10, id="around-the-floor"),
        pytest.param(torch.tensor([[FP32_MAX, -1.0], [1.0, 1e30]]), id="fp32-max"),
        pytest.param(torch.arange(-254, 255)[None] / 2, id="ties"),  # of INT8, whose scale is 1
    ],
)
def test_bytes_equal_the_oracle(x: torch.Tensor, dtype: torch.dtype) -> None:
    assert_bytes(x, dtype)


@codes_dtype
@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=3, max_side=9),
        elements=st.floats(-(2.0**99), 2.0**99, width=32),
    )
)
def test_bytes_of_anything_finite(dtype: torch.dtype, x: oracle.F32) -> None:
    assert_bytes(torch.from_numpy(x), dtype)


def test_codes_are_symmetric() -> None:
    codes, _ = channel.quantize_rows(torch.tensor([[-1.0, 0.5, 1.0]]), torch.int8)
    assert codes.tolist() == [[-127, 64, 127]]


@codes_dtype
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_token_alone(value: float, dtype: torch.dtype) -> None:
    x, weight = randn(3, 4), channel.quantize_rows(randn(8, 4, seed=1), dtype)
    sound = channel.channel_linear(x, *weight)
    x[1, 2] = value
    y = channel.channel_linear(x, *weight)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], sound[[0, 2]])


@codes_dtype
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gemm_is_the_oracles(has_bias: bool, dtype: torch.dtype) -> None:
    """And is not where the scale of a row is its neighbour's: the control."""
    x, weight = randn(6, 200), randn(48, 200, seed=1) * torch.arange(1, 49)[:, None]
    bias = randn(48, seed=2) if has_bias else None
    codes, scale = channel.quantize_rows(weight, dtype)
    exact = oracle.channel_linear(
        x.numpy(), raw(codes), scale.numpy(), bias.numpy() if bias is not None else None
    )
    bound = ROUNDING * (x.abs() @ weight.abs().T).numpy()
    assert (np.abs(channel.channel_linear(x, codes, scale, bias).numpy() - exact) < bound).all()
    wrong = channel.channel_linear(x, codes, scale.roll(1, 0), bias).numpy()
    assert (np.abs(wrong - exact) > bound).mean() > 0.9
