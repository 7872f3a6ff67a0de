"""Activations: quantization alone, and in the norm or the SiLU that makes what is quantized.

Shape suffixes: M tokens, K channels, I channels of each half of gate_up.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.pair import LAYERS, SHAPE, TOKENS, Pair, assert_close, assert_same, sets_of
from benchmarks.measuring import Call
from sgl_fp8rl.ops import activation_triton as ours

DEVICE = "cuda"
EPS = 1e-6
BF16 = torch.bfloat16
CODED = 1 + 4 / 128
"""Bytes of a code and of its share of a scale."""
Inputs = tuple[torch.Tensor, ...]


def pairs() -> Iterator[Pair]:
    """Each kernel at each size."""
    for kernel in (quantize, norm, silu):
        for tokens in TOKENS:
            yield kernel(tokens)


def quantize(tokens: int) -> Pair:
    """Quantization of what nobody has quantized: attention's output."""
    K = SHAPE.heads * SHAPE.head_dim
    inputs = _drawn(tokens, K)

    def check() -> None:
        (x,) = inputs[0]
        _assert_quantized(x, ours.quantize_tokens(x))

    return Pair(
        "quantize",
        str(tokens),
        int(tokens * K * (2 + CODED)),
        check,
        _calls(stock_quantize, inputs),
        _calls(ours.quantize_tokens, inputs),
    )


def norm(tokens: int) -> Pair:
    """The residual's sum, RMSNorm and quantization; x and the residual are written to."""
    K = SHAPE.hidden
    weight_K = torch.rand(K, device=DEVICE).to(BF16)
    inputs = [(*some, weight_K) for some in _drawn(tokens, K, count=2)]

    def fused(x_MK: torch.Tensor, residual_MK: torch.Tensor, weight_K: torch.Tensor) -> Any:
        return ours.rms_norm_quantize(x_MK, weight_K, EPS, residual_MK)

    def check() -> None:
        x, residual, weight = inputs[0]
        stock, mine = (x.clone(), residual.clone()), (x.clone(), residual.clone())
        stock_norm(*stock, weight)
        y, quantized = fused(*mine, weight)
        assert_close("RMSNorm", y, stock[0])
        assert_same("the residual", mine[1], stock[1])
        _assert_quantized(y, quantized)

    return Pair(
        "add + RMSNorm + quantize",
        str(tokens),
        int(tokens * K * (4 * 2 + CODED)),
        check,
        _calls(stock_norm, inputs),
        _calls(fused, inputs),
    )


def silu(tokens: int) -> Pair:
    """``silu(gate) * up`` and quantization."""
    I = SHAPE.intermediate  # noqa: E741
    inputs = _drawn(tokens, 2 * I)

    def check() -> None:
        (gate_up,) = inputs[0]
        y, quantized = ours.silu_mul_quantize(gate_up)
        assert_close("SiLU", y, stock_silu(gate_up)[0])
        _assert_quantized(y, quantized)

    return Pair(
        "SiLU + quantize",
        str(tokens),
        int(tokens * I * (2 * 2 + 2 + CODED)),
        check,
        _calls(stock_silu, inputs),
        _calls(ours.silu_mul_quantize, inputs),
    )


def stock_quantize(x_MK: torch.Tensor) -> Any:
    """Codes and scales in DeepGEMM's layout."""
    from sglang.kernels.ops.quantization.fp8_kernel import sglang_per_token_group_quant_fp8

    return sglang_per_token_group_quant_fp8(
        x_MK, 128, column_major_scales=True, scale_tma_aligned=True, scale_ue8m0=False
    )


def stock_norm(x_MK: torch.Tensor, residual_MK: torch.Tensor, weight_K: torch.Tensor) -> Any:
    """Two launches; x becomes what is quantized."""
    from sgl_kernel import fused_add_rmsnorm

    fused_add_rmsnorm(x_MK, residual_MK, weight_K, EPS)
    return stock_quantize(x_MK)


def stock_silu(gate_up_M2I: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Two launches: y, and what it is quantized to."""
    from sglang.srt.layers.activation import silu_and_mul

    y_MI = gate_up_M2I.new_empty(len(gate_up_M2I), gate_up_M2I.shape[1] // 2)
    silu_and_mul(gate_up_M2I, y_MI)
    return y_MI, stock_quantize(y_MI)


def _assert_quantized(y_MK: torch.Tensor, quantized: Any) -> None:
    for name, mine, other in zip(("codes", "scales"), quantized, stock_quantize(y_MK), strict=True):
        assert_same(name, mine, other)


def _drawn(tokens: int, channels: int, count: int = 1) -> list[Inputs]:
    """Sets of ``count`` tensors."""
    return [
        tuple(torch.randn(tokens, channels, device=DEVICE, dtype=BF16) for _ in range(count))
        for _ in range(sets_of(2 * count * tokens * channels))
    ]


def _calls(action: Callable[..., Any], inputs: list[Inputs]) -> list[Call]:
    return [partial(action, *inputs[layer % len(inputs)]) for layer in range(LAYERS)]
