"""The reference of the activation kernels against the float64 oracle."""

import runpy
import weakref
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_fp8rl.ops import activation, reference
from sgl_fp8rl.ops.activation import (
    Quantized,
    attach,
    attached,
    detach,
    quantize_tokens,
    rms_norm_quantize,
    silu_mul_quantize,
)
from tests import activation_oracle as exact
from tests.activation_oracle import MAX_ULPS, planted, rows

Tensor = torch.Tensor
BF16 = torch.bfloat16


both = pytest.mark.parametrize("power_of_two", [False, True], ids=["", "power-of-two"])


def assert_quantized(got: Quantized, y_MK: Tensor, power_of_two: bool = False) -> None:
    """The oracle's bytes of y, in DeepGEMM's layout."""
    M, K = y_MK.shape
    assert got.codes_MK.dtype == torch.float8_e4m3fn and got.codes_MK.is_contiguous()
    assert got.scales_Mk.dtype == torch.float32 and got.scales_Mk.shape == (M, K // 128)
    assert got.scales_Mk.stride() == (1, -(-M // 4) * 4)
    codes, scales = exact.quantize(y_MK, power_of_two=power_of_two)
    np.testing.assert_array_equal(got.codes_MK.view(torch.uint8).numpy(), codes)
    np.testing.assert_array_equal(got.scales_Mk.numpy(), scales)


def test_bytes_of_powers_of_two_are_those_of_the_cpu_platform() -> None:
    """The trainer's bytes too: no reciprocal is approximated."""
    x_MK = torch.cat([planted()[:2], planted()[6:], rows(16, 256)])  # without NaN and Inf
    got, want = quantize_tokens(x_MK, power_of_two=True), reference.quantize_activation
    for mine, other in zip(got, want(x_MK, power_of_two=True), strict=True):
        assert torch.equal(mine.contiguous().view(torch.uint8), other.view(torch.uint8))
    # the control: where SGLang's kernel multiplies by a reciprocal, a division makes other bytes
    x_MK = rows(64, 2048)
    for mine, other in zip(quantize_tokens(x_MK), want(x_MK), strict=True):
        assert not torch.equal(mine.contiguous().view(torch.uint8), other.view(torch.uint8))


def test_it_may_be_imported_where_a_model_is_made_on_the_meta_device() -> None:
    with torch.device("meta"):
        anew = runpy.run_path(activation.__file__)
    assert anew["INVERSE_MAX"] == activation.INVERSE_MAX


@both
@pytest.mark.parametrize("x_MK", [planted(), rows(5, 640)[:, 128:384]], ids=["odd", "wider"])
def test_bytes(x_MK: Tensor, power_of_two: bool) -> None:
    got = quantize_tokens(x_MK, power_of_two=power_of_two)
    assert_quantized(got, x_MK, power_of_two)
    codes = got.codes_MK.view(torch.uint8)
    assert not bool(((codes & 0x7F) == 0x7F).any())  # SGLang's kernel makes no NaN
    empty = quantize_tokens(x_MK[:0], power_of_two=power_of_two)
    assert empty.codes_MK.shape == (0, 256) and empty.scales_Mk.shape == (0, 2)


def test_codes_of_what_is_no_ordinary_number() -> None:
    got = quantize_tokens(planted())
    codes = got.codes_MK.view(torch.uint8)
    zeros, negative, nans, one_nan = codes[:4, :128].tolist()
    assert set(zeros) == {0} and set(negative) == {0x80} and set(nans) == {0x7E}
    assert one_nan[:3] == [0x7E, 0x76, 0xFE]  # NaN is 448; 1.5 and -3 of an amax of 3
    least = torch.tensor(1e-10) * activation.INVERSE_MAX
    assert got.scales_Mk[2, 0] == got.scales_Mk[0, 0] == least
    infinite = codes[4, :4].tolist()
    assert got.scales_Mk[4, 0] == torch.inf and infinite == [0x7E, 0x00, 0x80, 0x80]
    assert set(codes[6, :2].tolist()) == {0x00, 0x80}  # an amax whose reciprocal is flushed


@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.floats(0, 40),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
def test_bytes_of_any_rows(M: int, k: int, spread: float, seed: int, power_of_two: bool) -> None:
    x_MK = rows(M, 128 * k, spread=spread, seed=seed)
    assert_quantized(quantize_tokens(x_MK, power_of_two=power_of_two), x_MK, power_of_two)


@both
@pytest.mark.parametrize("add", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("K", [128, 384, 4096])
def test_norms(K: int, add: bool, power_of_two: bool) -> None:
    x_MK, weight_K = rows(6, K), rows(1, K, seed=3, spread=1)[0]
    residual_MK = rows(6, K, seed=1) if add else None
    want = exact.rms_norm(x_MK, weight_K, 1e-6, residual_MK)
    summed = None if residual_MK is None else (x_MK.float() + residual_MK.float()).bfloat16()
    y_MK, quantized = rms_norm_quantize(
        x_MK, weight_K, 1e-6, residual_MK, power_of_two=power_of_two
    )
    assert exact.ulps(y_MK, want) < MAX_ULPS
    assert_quantized(quantized, y_MK, power_of_two)
    assert (y_MK is x_MK) == add  # in place, as SGLang's
    if residual_MK is not None:
        assert torch.equal(residual_MK, summed)


def test_control_a_norm_of_the_rounded_sum_is_seen() -> None:
    # HF normalizes the BF16 sum; SGLang's kernel does not round it first.
    x_MK, residual_MK, weight_K = rows(6, 512), rows(6, 512, seed=1), torch.ones(512, dtype=BF16)
    want = exact.rms_norm(x_MK, weight_K, 1e-6, residual_MK)
    y_MK, _ = rms_norm_quantize((x_MK.float() + residual_MK.float()).bfloat16(), weight_K, 1e-6)
    assert exact.ulps(y_MK, want) > MAX_ULPS


@pytest.mark.parametrize("I", [128, 384, 1536])
def test_silu(I: int) -> None:  # noqa: E741
    gate_up = rows(6, 2 * I, spread=3)
    y_MI, quantized = silu_mul_quantize(gate_up)
    assert exact.ulps(y_MI, *exact.silu_mul(gate_up)) < MAX_ULPS
    assert_quantized(quantized, y_MI)


def test_silu_of_extremes() -> None:
    gate = torch.tensor([0.0, -0.0, 1e-40, 88, -87, -88.5, -90, 300, -300, 1e38]).repeat(26)[:256]
    gate_up = torch.stack(
        [torch.cat([gate, up * torch.ones(256)]) for up in (1.0, -3.0)]
    ).bfloat16()
    y_MI, quantized = silu_mul_quantize(gate_up)
    assert exact.ulps(y_MI, *exact.silu_mul(gate_up)) < MAX_ULPS
    assert_quantized(quantized, y_MI)
    gate_up[0, :2] = torch.tensor([torch.nan, -torch.inf])
    gate_up[1, 256] = torch.inf
    y_MI, quantized = silu_mul_quantize(gate_up)
    assert bool(y_MI[0, :2].isnan().all()) and bool(y_MI[1, 0].isnan())  # 0 * Inf
    assert_quantized(quantized, y_MI)


def test_what_is_attached_is_found_until_the_tensor_changes() -> None:
    y_MK = rows(4, 256)
    quantized = quantize_tokens(y_MK)
    assert attached(y_MK) is None
    attach(y_MK, quantized)
    assert attached(y_MK) is quantized
    assert attached(y_MK.view(-1, 256)) is quantized  # as SGLang's MoE blocks pass it on
    for other in (y_MK[:2], y_MK[1:], y_MK.view(8, 128), y_MK[:, :128], y_MK.clone()):
        assert attached(other) is None
    assert attached(y_MK.view(-1)) is None
    y_MK.mul_(2)
    assert attached(y_MK) is None
    attach(y_MK, quantize_tokens(y_MK))
    y_MK.view(-1)[3] = 0  # through a view
    assert attached(y_MK) is None and attached(y_MK.view(-1, 256)) is None
    attach(y_MK, quantized)
    detach(y_MK)
    detach(y_MK)
    assert attached(y_MK) is None
    square = rows(256, 256)
    attach(square, quantize_tokens(square))
    assert attached(square.t()) is None and attached(square.t().t()) is not None


def test_what_is_attached_goes_with_the_memory() -> None:
    y_MK = rows(4, 256)
    quantized = quantize_tokens(y_MK)
    gone = weakref.ref(quantized.codes_MK)
    attach(y_MK, quantized)
    del quantized
    view = y_MK.view(-1, 256)
    del y_MK
    assert attached(view) is not None and gone() is not None
    del view
    assert gone() is None


def test_nothing_is_attached_where_changes_are_not_counted() -> None:
    with torch.inference_mode():
        y_MK = rows(4, 256)
        attach(y_MK, quantize_tokens(y_MK))
        assert attached(y_MK) is None
    assert attached(y_MK) is None
    with torch.no_grad():  # what SGLang runs under
        y_MK = rows(4, 256)
        attach(y_MK, quantize_tokens(y_MK))
        assert attached(y_MK) is not None
        y_MK += 1
        assert attached(y_MK) is None


ONES = torch.ones(256, dtype=BF16)
NORM = partial(rms_norm_quantize, eps=1e-6)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: quantize_tokens(torch.zeros(2, 256)), r"torch\.float32 \[2, 256\].*bfloat16"),
        (lambda: quantize_tokens(torch.zeros(2, 2, 128, dtype=BF16)), r"\[2, 2, 128\]"),
        (lambda: quantize_tokens(torch.zeros(256, 128, dtype=BF16).t()), r"strides \(1, 128\)"),
        (lambda: quantize_tokens(torch.zeros(2, 100, dtype=BF16)), r"\b100 .*\b128\b.*BF16"),
        (lambda: NORM(rows(2, 128), ONES), r"weight.* \[256\].*\[128\]"),
        (
            lambda: NORM(rows(2, 256), ONES, residual_MK=rows(3, 256)),
            r"residual.*\[3, 256\].*\[2, 256\]",
        ),
        (lambda: silu_mul_quantize(rows(2, 256)[:, :128]), r"\b64 .*\b128\b"),
    ],
)
def test_what_cannot_be_quantized(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        call()
