"""``sgl_fp8rl.ops.reference`` against the float64 oracle: byte equality, bounds, refusals."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sgl_fp8rl.ops import reference
from tests import oracle

Tensor = torch.Tensor
BF16_MAX = torch.finfo(torch.bfloat16).max
FP32_MAX = torch.finfo(torch.float32).max
SHAPES = [
    (1, 1),
    (128, 128),
    (128, 129),
    (129, 128),
    (300, 257),
    (256, 512),
    (3, 130, 70),
    (2, 2, 128, 200),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


both = pytest.mark.parametrize("power_of_two", [False, True], ids=["", "power-of-two"])


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def f32(x: Tensor) -> oracle.F32:
    return np.asarray(x.float().numpy())


def codes_of(codes: Tensor) -> oracle.Codes:
    assert codes.dtype is reference.FP8_DTYPE
    return np.asarray(codes.view(torch.uint8).numpy())


def assert_oracle_bytes(x: Tensor) -> None:
    """Of a weight and of activations."""
    for power_of_two in (False, True):
        found = reference.quantize_weight(x, power_of_two=power_of_two)
        assert_bytes(*found, *oracle.quantize_weight(f32(x), power_of_two=power_of_two))
        found = reference.quantize_activation(x, power_of_two=power_of_two)
        assert_bytes(*found, *oracle.quantize_activation(f32(x), power_of_two=power_of_two))


def assert_bytes(
    codes: Tensor, scales: Tensor, want_codes: oracle.Codes, want_scales: oracle.F32
) -> None:
    assert scales.dtype is torch.float32
    np.testing.assert_array_equal(scales.numpy(), want_scales)
    np.testing.assert_array_equal(codes_of(codes), want_codes)


def excess(x: Tensor, codes: Tensor, scale: Tensor, rows: int = oracle.BLOCK) -> float:
    return oracle.excess_error(f32(x), codes_of(codes), scale.numpy(), rows=rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bytes_equal_the_oracle(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Which is within half an ulp."""
    x = randn(*shape, seed=sum(shape), dtype=dtype)
    assert_oracle_bytes(x)
    assert_oracle_bytes(x.mT)  # whatever its strides
    for power_of_two in (False, True):
        assert excess(x, *reference.quantize_weight(x, power_of_two=power_of_two)) <= 1
        tokens = reference.quantize_activation(x, power_of_two=power_of_two)
        assert excess(x, *tokens, rows=1) <= 1


def test_ties_round_to_even() -> None:
    # A block with amax 448 has scale 1: each midpoint between neighbours is a tie. Of the two
    # codes around it, exactly one is even.
    middles = torch.from_numpy((oracle.E4M3[:126] + oracle.E4M3[1:127]) / 2).float()
    weight = torch.cat([middles, torch.tensor([448.0])])[:, None] * torch.tensor([1.0, -1.0])
    codes = codes_of(reference.quantize_weight(weight)[0])
    np.testing.assert_array_equal(codes % 2, 0)
    assert_oracle_bytes(weight)


def planted(value: float, *, into: float = 0.02) -> Tensor:
    """Small random values with ``value`` once in the last, ragged block."""
    weight = randn(200, 300) * into
    weight[150, 290] = value
    return weight


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(torch.zeros(256, 256), id="zero"),
        pytest.param(-torch.zeros(3, 5), id="minus-zero"),
        pytest.param(torch.cat([randn(128, 256), torch.zeros(128, 256)]), id="zero-block"),
        pytest.param(torch.full((128, 128), 1e-45), id="denormal"),
        pytest.param(randn(130, 130) * 1e-40, id="denormal-random"),
        pytest.param(randn(130, 130) * 1e-10, id="around-the-floor"),
        pytest.param(planted(1e4), id="outlier"),
        pytest.param(planted(-FP32_MAX), id="fp32-max"),
        pytest.param(torch.full((4, 4), FP32_MAX), id="all-fp32-max"),
        pytest.param(planted(BF16_MAX).bfloat16(), id="bf16-max"),
        pytest.param(planted(65504.0).half(), id="fp16-max"),
    ],
)
def test_bytes_of_extreme_values(weight: Tensor) -> None:
    assert_oracle_bytes(weight)
    for power_of_two in (False, True):
        codes, scale = reference.quantize_weight(weight, power_of_two=power_of_two)
        assert (scale >= torch.finfo(torch.float32).tiny).all()  # normal, so that none is flushed
        assert not codes.float().isnan().any()
        assert excess(weight, codes, scale) <= 1


def test_no_code_passes_448() -> None:
    # amax / (amax / 448) rounds up past 448 for some amax; a cast that does not saturate makes
    # NaN of what lies past 464 and the largest magnitude must always be the code of 448.
    amax = torch.linspace(1, 2, 4096)
    codes, _ = reference.quantize_activation(amax[:, None] * torch.tensor([1.0, -1.0]))
    np.testing.assert_array_equal(codes.float(), np.tile([448.0, -448.0], (4096, 1)))


@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=3, max_side=140),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
        fill=st.just(0.0),
    )
)
def test_any_finite_tensor_has_the_oracle_bytes(values: oracle.F32) -> None:
    assert_oracle_bytes(torch.from_numpy(values))


@given(
    st.tuples(st.integers(1, 300), st.integers(1, 300)),
    st.integers(0, 2**32 - 1),
    st.floats(-30, 30),
    st.sampled_from(DTYPES[:2]),
)
def test_any_magnitude_has_the_oracle_bytes(
    shape: tuple[int, int], seed: int, log_size: float, dtype: torch.dtype
) -> None:
    assert_oracle_bytes((randn(*shape, seed=seed) * 10.0**log_size).to(dtype))


def blocks_of_many_sizes() -> Tensor:
    """[384, 512] whose twelve blocks differ in magnitude, so that a wrong scale shows."""
    gain = torch.exp2(torch.arange(12.0).reshape(3, 4) - 6)
    return randn(384, 512) * gain.repeat_interleave(128, 0).repeat_interleave(128, 1)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda s: s.roll(1, dims=-1), id="shifted-by-one-column"),
        pytest.param(lambda s: s.roll(1, dims=-2), id="shifted-by-one-row"),
        pytest.param(lambda s: s.T.reshape(s.shape), id="transposed"),
        pytest.param(lambda s: 1 / s, id="inverted"),
    ],
)
def test_a_misplaced_scale_breaks_the_bound(spoil: Callable[[Tensor], Tensor]) -> None:
    weight = blocks_of_many_sizes()
    codes, scale = reference.quantize_weight(weight)
    assert excess(weight, codes, scale) <= 1
    assert excess(weight, codes, spoil(scale)) > 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_dequantize_is_the_rounded_product(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    # A code has 4 significant bits and a scale 24: their product is exact in float64.
    for kind in ("weight", "activation"):
        codes, scale = getattr(reference, f"quantize_{kind}")(randn(*shape))
        exact = getattr(oracle, f"dequantize_{kind}")(codes_of(codes), scale.numpy())
        got = getattr(reference, f"dequantize_{kind}")(codes, scale, dtype)
        assert torch.equal(got, torch.from_numpy(exact).float().to(dtype))


@given(st.integers(0, 2**32 - 1), st.floats(-9, 30), st.sampled_from(DTYPES[:2]))
def test_quantizing_again_gives_the_same_codes(
    seed: int, log_size: float, dtype: torch.dtype
) -> None:
    # In FP32 because the scale is a fixed point; in BF16 because its two roundings, 2**-8 of the
    # value together, are less than half an ulp of a code (at least 2**-5 of it).
    weight = randn(130, 200, seed=seed) * 10.0**log_size
    codes, scale = reference.quantize_weight(weight)
    again, scale_again = reference.quantize_weight(reference.dequantize_weight(codes, scale, dtype))
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8))
    relative = 2**-8 if dtype is torch.bfloat16 else 0
    torch.testing.assert_close(scale_again, scale, rtol=relative, atol=0)


def amaxes() -> Tensor:
    """448 times each power of two, its neighbours, and every mantissa's upper 12 bits; [A]."""
    around = 448 * torch.exp2(torch.arange(-60.0, 119))
    near = [torch.nextafter(around, torch.tensor(to)) for to in (0.0, torch.inf)]
    return torch.cat([around, *near, 1 + torch.arange(4096) / 4096])


def test_a_scale_is_the_least_power_of_two_that_fits() -> None:
    scales = reference.scale_of(amaxes(), power_of_two=True).double()
    fractions, _ = torch.frexp(scales)
    assert (fractions == 0.5).all()
    largest = (amaxes().double() / scales)[amaxes() > reference.AMAX_FLOOR]
    assert (largest <= 448).all() and (largest > 224).all()


def test_scales_and_codes_are_those_of_deep_gemm() -> None:
    """As SGLang requantizes by it on Blackwell, above its floor; and then values stay."""
    fp8_utils = pytest.importorskip("sglang.srt.layers.quantization.fp8_utils")
    amax = amaxes()
    want = fp8_utils.ceil_to_ue8m0(amax.clamp(min=reference.AMAX_FLOOR) / 448.0)
    assert torch.equal(reference.scale_of(amax, power_of_two=True), want)
    weight = blocks_of_many_sizes().bfloat16()
    codes, scale = reference.quantize_weight(weight, power_of_two=True)
    for found, made in zip(fp8_utils.per_block_cast_to_fp8(weight), (codes, scale), strict=True):
        assert torch.equal(found.view(torch.uint8), made.view(torch.uint8))
    values = reference.dequantize_weight(codes, scale)
    again = fp8_utils.per_block_cast_to_fp8(values.bfloat16())
    assert torch.equal(reference.dequantize_weight(*again), values)
    plain = reference.dequantize_weight(*reference.quantize_weight(weight))
    again = fp8_utils.per_block_cast_to_fp8(plain.bfloat16())
    assert not torch.equal(reference.dequantize_weight(*again), plain)  # the control


@given(
    st.integers(0, 199),
    st.integers(0, 299),
    st.sampled_from([float("nan"), float("inf"), -float("inf")]),
    st.booleans(),
)
def test_nan_and_inf_are_refused_in_a_weight_and_their_tokens_own(
    row: int, col: int, bad: float, power_of_two: bool
) -> None:
    """In any position. Tokens of other requests are computed with that one."""
    x, weight = randn(200, 300), reference.quantize_weight(randn(40, 300))
    sound = reference.fp8_linear(x, *weight, power_of_two=power_of_two)
    x[row, col] = bad
    _, scales = reference.quantize_weight(x, power_of_two=power_of_two)
    assert (~scales.isfinite()).nonzero().tolist() == [[row // 128, col // 128]]
    y = reference.fp8_linear(x, *weight, power_of_two=power_of_two)
    others = torch.arange(len(x)) != row
    assert y[row].isnan().all()
    assert torch.equal(y[others], sound[others])


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FFF0000, 0x7FC00000, 0x7F800001, 0x7F800000, -1])
def test_no_nan_has_a_scale(bits: int) -> None:
    """A GPU makes other NaNs than a CPU, and a carry into the sign would make 0 of some."""
    amax = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    for power_of_two in (False, True):
        assert not reference.scale_of(amax, power_of_two=power_of_two).isfinite().any()


FP32_ROUNDING = 2.0**-24


def linear_excess(
    y: Tensor,
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    power_of_two: bool = False,
) -> float:
    """Largest error of ``y`` against float64, in units of FP32's worst case.

    Higham's bound for a dot product of K terms, with two roundings more for the dequantized
    factors, one for the bias and one for the output's dtype.
    """
    c, s = codes_of(codes), scale.numpy()
    bias_N = None if bias is None else f32(bias)
    want = oracle.linear(f32(x), c, s, bias_N, power_of_two=power_of_two)
    tokens = oracle.quantize_activation(f32(x), power_of_two=power_of_two)
    x_abs = np.abs(oracle.dequantize_activation(*tokens))
    size = x_abs @ np.abs(oracle.dequantize_weight(c, s)).T
    if bias is not None:
        size += np.abs(f32(bias))
    output = torch.finfo(y.dtype).eps / 2 * np.abs(want) * (y.dtype != torch.float32)
    bound = (x.shape[-1] + 4) * FP32_ROUNDING * size + 1.01 * output
    return float(np.max(np.abs(y.double().numpy() - want) / bound))


@both
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_fp8_linear_against_float64(
    dtype: torch.dtype, with_bias: bool, power_of_two: bool
) -> None:
    x = randn(5, 300, seed=1, dtype=dtype)
    bias = randn(257, seed=2, dtype=dtype) if with_bias else None
    codes, scale = reference.quantize_weight(randn(257, 300), power_of_two=power_of_two)
    y = reference.fp8_linear(x, codes, scale, bias, power_of_two=power_of_two)
    assert y.dtype is dtype and y.shape == (5, 257)
    assert linear_excess(y, x, codes, scale, bias, power_of_two) <= 1
    led = reference.fp8_linear(x[None], codes, scale, bias, power_of_two=power_of_two)
    assert torch.equal(led, y[None]), "leading dimensions stay"
    # the controls: the other scales, and activations that are not quantized
    assert linear_excess(y, x, codes, scale, bias, not power_of_two) > 1
    plain = x.float() @ reference.dequantize_weight(codes, scale).T
    assert linear_excess(plain, x, codes, scale, None, power_of_two) > 1
