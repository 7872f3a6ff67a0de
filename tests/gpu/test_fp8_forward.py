"""A trainer's codes and products on a GPU, against the reference implementation on it."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from sgl_fp8rl.formats import BLOCKS
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.ops import block_linear
from sgl_fp8rl.ops.reference import dequantize_weight, fp8_linear, quantize_weight
from tests.gpu.conftest import INTERPRETED
from trainer_bridge.fp8.fp8_layers import convert
from trainer_bridge.fp8.fp8_weights import FP8Parameter
from trainer_bridge.shards.codes_memory import CodesMemory

Tensor = torch.Tensor
BF16 = torch.bfloat16
SHAPES = [(1024, 4096), (4096, 1024), (384, 640)]
ERROR = 2.0**-5
"""Of a product, as a part of its largest element: activation codes are SGLang's. 0.014 where both
formulas are computed on a CPU."""
GRADIENT_ERROR = 2.0**-6
"""Of a gradient against float64, as a part of its largest element. 0.0030 on a CPU."""

blocks = pytest.mark.parametrize("fmt", BLOCKS, ids=lambda fmt: fmt.name)
on_a_gpu = pytest.mark.skipif(INTERPRETED, reason="these products are not Triton's")


def drawn(*shape: int, seed: int = 0, device: str = "cuda") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16).to(device)


def assert_codes(found: Any, weight: Tensor, fmt: WeightFormat = BLOCKS[0]) -> None:
    """The reference's of the weight in BF16."""
    codes, scales = fmt.encode(weight.to(BF16)).values()
    assert torch.equal(found.codes_NK.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found.scale_inv_nk, scales)


@blocks
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(256, 384), (3, 128, 256)], ids=str)
def test_codes_are_the_reference(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    fmt: WeightFormat,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of weights rounded to BF16; and again, into the same memory, after a change."""
    monkeypatch.setattr(CodesMemory, "write", CodesMemory.launch)
    weight = 0.1 * drawn(*shape, device=device).to(dtype)
    weight += 1e-4 * drawn(*shape, seed=1, device=device)  # no values of BF16
    parameter = FP8Parameter("weight", BF16, fmt)
    first = parameter.codes(weight)
    for _ in range(2):
        found = parameter.codes(weight)
        assert_codes(found, weight, fmt)
        assert found.codes_NK.data_ptr() == first.codes_NK.data_ptr()
        weight.mul_(-1.5)


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_codes_of_several_weights(dtype: torch.dtype, device: str) -> None:
    """In a few launches, also of weights that moved; the first one that holds NaN is told."""
    shapes = (256, 384), (3, 128, 256), (200, 130)
    weights = [drawn(*s, seed=i, device=device).to(dtype) for i, s in enumerate(shapes)]
    memory = CodesMemory(weights, BF16)
    for _ in range(2):
        memory.restart()
        memory.launch(weights)
        assert memory.bad() is None
        for weight, found in zip(weights, memory.codes, strict=True):
            assert_codes(found, weight)
        weights = [-1.5 * weight for weight in weights]
    weights[1][2, 5, 7] = torch.nan
    memory.launch(weights)
    assert memory.bad() == 1
    weights[1][2, 5, 7] = 0.0
    memory.launch(weights)
    assert memory.bad() == 1, "the control: it is told until a restart"
    memory.restart()
    memory.launch(weights)
    assert memory.bad() is None


@pytest.fixture(params=["deep_gemm", "torch"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if torch.cuda.get_device_capability() != block_linear.HOPPER:
        pytest.skip("these products take FP32 scales on Hopper alone")
    if request.param == "deep_gemm":
        pytest.importorskip("deep_gemm")
    monkeypatch.setattr(block_linear, "_product_on", lambda device: request.param)
    yield request.param


@on_a_gpu
@pytest.mark.usefixtures("product")
@pytest.mark.parametrize("rows", [1, 5, 130, 2048])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@blocks
def test_a_linear(shape: tuple[int, int], rows: int, fmt: WeightFormat) -> None:
    x, bias = drawn(rows, shape[1]), drawn(shape[0], seed=2)
    codes, scales = fmt.encode(drawn(*shape, seed=1)).values()
    linear = partial(block_linear.linear, power_of_two=fmt.power_of_two_scales)
    reference = partial(fp8_linear, power_of_two=fmt.power_of_two_scales)
    found = linear(x, codes, scales, bias)
    exact = reference(x.float(), codes, scales, bias)
    assert found.dtype == BF16 and error(found, exact) < ERROR
    wrong = reference(x.float(), codes, scales.roll(1, 1) * 1.2, bias)  # the control
    assert error(found, wrong) > ERROR


counts_of_experts = pytest.mark.parametrize(
    "counts", [(3, 0, 130, 128), (0, 0, 0, 1), (0, 0, 0, 0)], ids=str
)


@on_a_gpu
@pytest.mark.usefixtures("product")
@counts_of_experts
@blocks
def test_rows_of_experts(counts: tuple[int, ...], fmt: WeightFormat) -> None:
    x, power_of_two = drawn(sum(counts), 512), fmt.power_of_two_scales
    codes, scales = fmt.encode(drawn(4, 768, 512, seed=1)).values()
    found = block_linear.linear_by_expert(x, counts, codes, scales, power_of_two=power_of_two)
    parts = zip(x.float().split(list(counts)), codes, scales, strict=True)
    exact = torch.cat([fp8_linear(*part, power_of_two=power_of_two) for part in parts])
    assert found.shape == exact.shape
    assert not len(x) or error(found, exact) < ERROR


@on_a_gpu
@pytest.mark.usefixtures("product")
def test_gradients() -> None:
    layer: Any = torch.nn.Linear(640, 384, dtype=BF16, device="cuda")
    convert(layer, "layer", BF16)
    x, dy = drawn(77, 640).requires_grad_(), drawn(77, 384, seed=1)
    layer(x).backward(dy)
    weight = dequantize_weight(*quantize_weight(layer.weight.detach())).double()
    assert error(x.grad, dy.double() @ weight) < GRADIENT_ERROR
    assert error(layer.weight.grad, dy.double().T @ x.detach().double()) < GRADIENT_ERROR
    assert error(layer.bias.grad, dy.double().sum(0)) < GRADIENT_ERROR


@on_a_gpu
@counts_of_experts
def test_gradients_of_experts(counts: tuple[int, ...]) -> None:
    dy, x = drawn(sum(counts), 768), drawn(sum(counts), 512, seed=2)
    codes, scales = quantize_weight(drawn(4, 768, 512, seed=1))
    dx = block_linear.input_gradient_by_expert(dy, counts, codes, scales)
    dweight = block_linear.weight_gradient_by_expert(dy, x, counts)
    weight, rows = dequantize_weight(codes, scales).double(), 0
    for expert, count in enumerate(counts):
        mine, rows = slice(rows, rows + count), rows + count
        assert count or not dweight[expert].any()
        if count:
            assert error(dx[mine], dy[mine].double() @ weight[expert]) < GRADIENT_ERROR
            exact = dy[mine].double().T @ x[mine].double()
            assert error(dweight[expert], exact) < GRADIENT_ERROR


def error(found: Any, exact: Tensor) -> float:
    return float((found.double() - exact.double()).abs().max() / exact.double().abs().max())
