"""The linears of a trainer: the engine's bytes on a CPU, and what GPU kernels are given."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sgl_fp8rl.engine.layers.linear import FP8RLLinearMethod
from sgl_fp8rl.engine.layers.moe import experts_reference
from sgl_fp8rl.ops import activation, block_linear
from sgl_fp8rl.ops.reference import (
    BLOCK,
    dequantize_activation,
    dequantize_weight,
    fp8_linear,
    quantize_weight,
)
from tests import oracle

Tensor = torch.Tensor
GRADIENT_ERROR = 2.0**-7
"""Of an input gradient, as a part of its largest element: the weight, the sum and the result are
BF16. Healthy: 0.0029; 0.026 with the weight that was not quantized."""
GEMM_ERROR = 2.0**-5
"""Of a product whose activation codes are SGLang's, as a part of its largest element. Healthy:
0.014, where the two formulas of the codes differ."""


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def weights(*shape: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    return quantize_weight(0.1 * drawn(*shape, seed=seed))


@pytest.mark.parametrize("rows", [1, 5, 130])
@pytest.mark.parametrize("has_bias", [False, True])
def test_projections_are_those_that_the_engine_stacks(rows: int, has_bias: bool) -> None:
    """Bit for bit, though the engine multiplies q, k and v at once."""
    x, parts = drawn(rows, 384), [weights(n, 384, seed=n) for n in (512, 256, 128)]
    biases = [drawn(len(codes), seed=9) if has_bias else None for codes, _ in parts]
    stacked = [torch.cat(each) for each in zip(*parts, strict=True)]
    layer = SimpleNamespace(weight=stacked[0], weight_scale_inv=stacked[1])
    bias = torch.cat([b for b in biases if b is not None]) if has_bias else None
    wanted = object.__new__(FP8RLLinearMethod).apply(layer, x, bias)
    found = [block_linear.linear(x, *part, b) for part, b in zip(parts, biases, strict=True)]
    assert torch.equal(torch.cat(found, -1), wanted)
    other = block_linear.linear(x, parts[0][0], parts[0][1] * (1 + 2**-7))  # the control
    assert not torch.equal(other, wanted[:, :512])


def test_rows_of_experts_are_those_of_the_engine() -> None:
    x, ids = drawn(7, 256), torch.tensor([[0, 1], [3, 1], [1, 0], [0, 3], [1, 3], [3, 0], [1, 0]])
    w13, w2 = weights(4, 512, 256), weights(4, 256, 256, seed=2)
    gates = torch.rand(7, 2, generator=torch.Generator().manual_seed(0))
    config = SimpleNamespace(
        activation="silu", apply_router_weight_on_input=False, routed_scaling_factor=None
    )
    layer = SimpleNamespace(
        **dict(zip(("w13_weight", "w13_weight_scale_inv"), w13, strict=True)),
        **dict(zip(("w2_weight", "w2_weight_scale_inv"), w2, strict=True)),
        moe_runner_config=config,
    )
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=4).tolist()
    assert 0 in counts
    gate, up = block_linear.linear_by_expert(x[order // 2], counts, *w13).chunk(2, -1)
    down = block_linear.linear_by_expert(F.silu(gate) * up, counts, *w2)
    weighted = down.float() * gates.flatten()[order, None]
    found = torch.zeros(7, 256).index_add(0, order // 2, weighted).bfloat16()
    assert torch.equal(found, experts_reference(layer, x, gates, ids))


def test_input_gradients() -> None:
    dy, (codes, scales) = drawn(33, 512), weights(512, 384)
    exact = dy.double().numpy() @ oracle.dequantize_weight(
        codes.view(torch.uint8).numpy(), scales.numpy()
    )
    found = block_linear.input_gradient(dy, codes, scales)
    assert found.dtype == torch.bfloat16
    assert _error(found, exact) < GRADIENT_ERROR
    # the control: the weight as it was before it was quantized
    unquantized = dy.double() @ (0.1 * drawn(512, 384, seed=1)).double()
    assert _error(unquantized, exact) > 2 * GRADIENT_ERROR


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("counts", [(3, 0, 17, 1), (0, 0, 0, 5), (0, 0, 0, 0)], ids=str)
def test_gradients_of_experts(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    dy, x = drawn(sum(counts), 256).to(dtype), drawn(sum(counts), 384, seed=2).to(dtype)
    codes, scales = weights(4, 256, 384)
    dx = block_linear.input_gradient_by_expert(dy, counts, codes, scales)
    dweight = block_linear.weight_gradient_by_expert(dy, x, counts)
    assert dx.dtype == dweight.dtype == dtype
    assert dx.shape == x.shape and dweight.shape == (4, 256, 384)
    rows = 0
    for expert, count in enumerate(counts):
        mine, rows = slice(rows, rows + count), rows + count
        weight = oracle.dequantize_weight(
            codes[expert].view(torch.uint8).numpy(), scales[expert].numpy()
        )
        exact = dy[mine].double().numpy().T @ x[mine].double().numpy()
        assert count or not dweight[expert].any()
        if count:
            assert _error(dx[mine], dy[mine].double().numpy() @ weight) < GRADIENT_ERROR
            assert _error(dweight[expert], exact) < GRADIENT_ERROR


def test_what_is_not_bf16_on_a_gpu_is_computed_by_the_reference() -> None:
    assert block_linear.product_of(drawn(1, 128)) == "reference"
    x = drawn(2, 128).float()
    found = block_linear.linear(x, *weights(128, 128))
    assert found.dtype == torch.float32 and torch.equal(found, fp8_linear(x, *weights(128, 128)))
    codes, scales = weights(3, 256, 384)
    for dtype in (torch.bfloat16, torch.float32):
        values = block_linear._dequantized(codes, scales, dtype)
        assert torch.equal(values, dequantize_weight(codes, scales, dtype))


class FakeDeepGemm:
    """DeepGEMM's calls, in plain torch, with what it demands of layouts."""

    def fp8_gemm_nt(self, x: Any, weight: Any, out: Tensor) -> None:
        assert type(x) is type(weight) is tuple
        scales = x[1]
        rows = -(-len(scales) // activation.ALIGNMENT) * activation.ALIGNMENT
        assert scales.stride() == (1, rows) and weight[1].is_contiguous()
        out.copy_(_product(*x, *weight))

    def m_grouped_fp8_gemm_nt_contiguous(
        self, x: Any, weight: Any, out: Tensor, expert_P: Tensor
    ) -> None:
        assert type(x) is type(weight) is tuple and expert_P.dtype == torch.int32
        assert len(expert_P) == len(out) and len(out) % BLOCK == 0
        for first in range(0, len(out), BLOCK):
            rows = slice(first, first + BLOCK)
            (expert,) = expert_P[rows].unique().tolist()  # a block is of one expert
            out[rows] = _product(x[0][rows], x[1][rows], weight[0][expert], weight[1][expert])


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    recipe_a: Any,
    scale_b: Tensor,
    recipe_b: Any,
    output_dtype: torch.dtype,
) -> Tensor:
    """torch's block-scaled product, with cuBLAS's demands of layouts."""
    assert (recipe_a, recipe_b) == (
        F.ScalingType.BlockWise1x128,
        F.ScalingType.BlockWise128x128,
    )
    (M, K), N = a.shape, b.shape[1]
    blocks = -(-K // BLOCK // 4) * 4
    assert M % 4 == 0 and a.is_contiguous() and b.t().is_contiguous()
    assert scale_a.shape == (M, K // BLOCK) and scale_a.stride() == (1, M)
    assert scale_b.shape == (blocks, N // BLOCK) and scale_b.stride() == (1, blocks)
    return _product(a, scale_a, b.t(), scale_b.t()[:, : K // BLOCK]).to(output_dtype)


def _product(codes: Tensor, scales: Tensor, weight: Tensor, scale_inv: Tensor) -> Tensor:
    x = dequantize_activation(codes, scales)
    return (x @ dequantize_weight(weight, scale_inv).T).bfloat16()


@pytest.fixture(params=["deep_gemm", "torch"])
def as_on_a_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(block_linear, "product_of", lambda x: request.param)
    monkeypatch.setattr(block_linear, "_deep_gemm", FakeDeepGemm)
    monkeypatch.setattr(block_linear, "_codes_of", activation.quantize_tokens)
    monkeypatch.setattr(F, "scaled_mm", scaled_mm, raising=False)
    if not hasattr(F, "ScalingType"):
        pytest.skip("this torch has no block-scaled product")
    return str(request.param)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("rows", [1, 6, 128])
def test_what_kernels_are_given(rows: int) -> None:
    x, (codes, scales), bias = drawn(rows, 640), weights(256, 640), drawn(256, seed=3)
    exact = fp8_linear(x.float(), codes, scales, bias)
    assert _error(block_linear.linear(x, codes, scales, bias), exact) < GEMM_ERROR
    wrong = scales.roll(1, 1) * 1.2  # the control: scales of other blocks
    assert _error(block_linear.linear(x, codes, wrong, bias), exact) > GEMM_ERROR


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("counts", [(3, 0, 130, 128), (0, 0, 0, 1), (0, 0, 0, 0)])
def test_what_kernels_are_given_of_experts(counts: Sequence[int]) -> None:
    x, (codes, scales) = drawn(sum(counts), 256), weights(4, 384, 256)
    parts = zip(x.float().split(list(counts)), codes, scales, strict=True)
    exact = torch.cat([fp8_linear(*part) for part in parts])
    found = block_linear.linear_by_expert(x, counts, codes, scales)
    assert found.shape == exact.shape
    if len(x):
        assert _error(found, exact) < GEMM_ERROR


def _error(found: Tensor, exact: Any) -> float:
    wanted = np.asarray(exact, dtype=np.float64)
    return float(np.abs(found.double().numpy() - wanted).max() / np.abs(wanted).max())
