"""What the GEMM of a layer is given: codes that a producer made, or of its own making."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.gemm import linear as gemm
from sgl_fp8rl.engine.layers.linear import FP8RLLinearMethod, FP8RLUE8M0LinearMethod
from sgl_fp8rl.engine.startup import kernel_checks
from sgl_fp8rl.formats.padding import Padding, Side
from sgl_fp8rl.ops import activation_triton
from sgl_fp8rl.ops.activation import Channels, attach, quantize_tokens
from sgl_fp8rl.ops.reference import (
    dequantize_activation,
    dequantize_weight,
    fp8_linear,
    quantize_activation,
    quantize_weight,
)

N, K = 256, 384
FLIPPED = 0.02
"""Largest relative difference from the reference, whose division rounds a few codes of activations
the other way. Healthy: at most 0.005; the product of another batch is near 1.4."""


class Kernel:
    """FP32 sums, rounded to BF16 once; counts its calls, and how often rows were quantized."""

    ran = quantized = 0

    def __call__(self, *operands: torch.Tensor) -> torch.Tensor:
        self.ran += 1
        return product(*operands)


def product(
    codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor
) -> torch.Tensor:
    x = dequantize_activation(codes, scales)
    return (x @ dequantize_weight(weight, weight_scales).T).bfloat16()


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()

    def quantize(x_MK: torch.Tensor, **place: Any) -> Any:
        kernel.quantized += 1
        return quantize_tokens(x_MK, **place)

    monkeypatch.setattr(activation_triton, "quantize_tokens", quantize)
    return kernel


@pytest.fixture(scope="module")
def layer() -> Any:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize_weight(weight)
    return SimpleNamespace(weight=codes, weight_scale_inv=scales)


def activation(*rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*rows, K, generator=generator).bfloat16()


@pytest.mark.parametrize("m", [1, 5, 100])
def test_the_product_is_the_reference(kernel: Kernel, layer: Any, m: int) -> None:
    y = gemm.linear(kernel, layer, activation(m)).float()
    want = fp8_linear(activation(m), layer.weight, layer.weight_scale_inv).float()
    assert kernel.ran == kernel.quantized == 1
    assert (y - want).norm() < FLIPPED * want.norm()
    assert (y.roll(1, -1) - want).norm() > 10 * FLIPPED * want.norm()  # the control


def test_what_a_producer_quantized_is_taken_where_it_fits(kernel: Kernel, layer: Any) -> None:
    """The same bytes as without, and no launch for them."""
    x = activation(5)
    plain = gemm.linear(kernel, layer, x)
    assert kernel.quantized == 1
    attach(x, quantize_tokens(x))
    assert torch.equal(gemm.linear(kernel, layer, x), plain)
    assert kernel.quantized == 1
    x.mul_(1.0)  # written to since
    assert torch.equal(gemm.linear(kernel, layer, x), plain)
    for others in (quantize_tokens(activation(6)), quantize_tokens(x, by_row=True)):
        attach(x, others)
        assert torch.equal(gemm.linear(kernel, layer, x), plain)
    assert kernel.quantized == 4
    assert gemm.quantized(x, x, by_row=True).is_by_row and kernel.quantized == 4
    attach(x, quantize_tokens(-x))  # the control: codes are taken, and not the values
    assert torch.equal(gemm.linear(kernel, layer, x), -plain)


def test_columns_may_lie_among_zeros(kernel: Kernel, layer: Any) -> None:
    """Whatever the weight holds there; and codes that lie elsewhere do not fit."""
    within, cols = Channels(64, K), Side(((64, K - 32),), K)
    x = activation(3, 5)[..., : K - 96].contiguous()
    y = gemm.linear(kernel, layer, x, None, within)
    assert torch.equal(y, gemm.linear(kernel, layer, cols.pad(x)))
    assert y.shape == (3, 5, N) and kernel.quantized == 2
    assert not torch.equal(y, gemm.linear(kernel, layer, cols.pad(x.roll(1, -1))))
    for lead in (0, 64):
        elsewhere = Channels(lead, K)
        attach(x, quantize_tokens(x.view(15, -1), within=elsewhere), elsewhere)
        assert torch.equal(y, gemm.linear(kernel, layer, x, None, within))
    assert kernel.quantized == 4, "one for the control, and one for what lies elsewhere"


def test_a_bias_leading_dimensions_and_no_tokens(kernel: Kernel, layer: Any) -> None:
    y = gemm.linear(kernel, layer, activation(0))
    assert (y.shape, y.dtype) == ((0, N), torch.bfloat16)
    assert kernel.ran == kernel.quantized == 0
    y = gemm.linear(kernel, layer, activation(3, 5))
    assert y.shape == (3, 5, N) and kernel.ran == 1
    flat, bias = activation(3, 5).view(15, K), torch.arange(N).bfloat16()
    assert torch.equal(y.view(15, N), gemm.linear(kernel, layer, flat))
    assert torch.equal(gemm.linear(kernel, layer, activation(3, 5), bias), y + bias)


class OnGpu:
    """A weight that says it is on a GPU."""

    device = SimpleNamespace(type="cuda")


def test_the_linear_method_runs_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(gemm, "linear", lambda *given, **_: calls.append(("ours", *given)))
    monkeypatch.setattr(
        compat.Fp8LinearMethod, "apply", lambda _self, *given: calls.append(("stock", *given))
    )
    method: Any = object.__new__(FP8RLLinearMethod)
    layer = SimpleNamespace(weight=OnGpu())
    x, bias = activation(1), torch.ones(N)
    method.apply(layer, x, bias)
    method.kernel = gemm.deep_gemm
    method.apply(layer, x, bias)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    method.apply(layer, x, bias)
    assert calls == [
        ("stock", layer, x, bias),
        ("ours", gemm.deep_gemm, layer, x, bias, None),
        ("stock", layer, x, bias),
    ]


def test_scales_of_activations_may_be_powers_of_two(kernel: Kernel, layer: Any) -> None:
    """The very codes of the CPU platform; the control is without."""
    y, plain = (
        gemm.linear(kernel, layer, activation(5), power_of_two=each) for each in (True, False)
    )
    codes, scales = quantize_activation(activation(5), power_of_two=True)
    assert torch.equal(y, product(codes, scales, layer.weight, layer.weight_scale_inv))
    assert not torch.equal(y, plain)


def test_powers_of_two_are_never_left_to_sglangs_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        gemm, "linear", lambda chosen, *_, power_of_two: calls.append((chosen, power_of_two))
    )
    method: Any = object.__new__(FP8RLUE8M0LinearMethod)
    layer, x = SimpleNamespace(weight=OnGpu()), activation(1)
    method.apply(layer, x)
    method.kernel = gemm.deep_gemm
    method.apply(layer, x)
    assert calls == [(gemm.triton, True), (gemm.deep_gemm, True)]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match=r"block-fp8-ue8m0.*drop --enable-torch-compile"):
        method.apply(layer, x)


def _of_the_first_block(codes: Any, scales: Any, weight: Any, weight_scales: Any) -> torch.Tensor:
    return product(codes, scales, weight, weight_scales[:1].expand_as(weight_scales))


def _with_an_option(codes: Any, scales: Any, weight: Any, scales_too: Any, layout: Any) -> None: ...


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("kernel", [product, _of_the_first_block, _with_an_option])
def test_a_gemm_that_computes_otherwise_ends_the_start(
    kernel: Any, is_padded: bool, layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activation_triton, "quantize_tokens", quantize_tokens)
    method: Any = object.__new__(FP8RLLinearMethod)
    method.kernel = kernel
    if is_padded:
        method.padding = Padding(Side(((0, N - 8),), N), Side(((64, K - 96),), K))
    layer = SimpleNamespace(**vars(layer), quant_method=method)
    layer.weight_scale_inv = layer.weight_scale_inv * torch.tensor([[1.0], [2.0]])
    if kernel is product:
        kernel_checks.check_linears([layer, layer])
        return
    with pytest.raises(RuntimeError, match="--fp8-gemm-backend triton"):
        kernel_checks.check_linears([layer])
