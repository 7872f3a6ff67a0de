"""An experts' layer as SGLang's, small, and its kernels in plain loops."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from sgl_fp8rl.engine.layers.moe import METHODS
from sgl_fp8rl.formats import BLOCK_FP8
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.ops.reference import (
    dequantize_activation,
    dequantize_weight,
)
from tests.activation_oracle import rows

Tensor = torch.Tensor
E, H, I, T = 6, 256, 128, 3  # noqa: E741
ROUNDED = 1
"""To a multiple of what the room for rows is rounded up: of 4 in SGLang 0.5.23."""


class Experts(nn.Module):
    """``FusedMoE`` as far as a quantization method reads it."""

    def __init__(self, device: str = "cpu", fmt: WeightFormat = BLOCK_FP8, **config: Any) -> None:
        super().__init__()
        sizes = {"w13": (2 * I, H), "w2": (H, I)}
        for seed, (name, (n, k)) in enumerate(sizes.items()):
            weights = [rows(n, k, seed=10 * seed + e, spread=1) / 16 for e in range(E)]
            made = [fmt.encode(weight.to(device)).values() for weight in weights]
            by_kind = zip(*made, strict=True)
            for suffix, parts in zip(("weight", "weight_scale_inv"), by_kind, strict=True):
                stacked = torch.stack([part.view(torch.uint8) for part in parts])
                value = stacked.view(parts[0].dtype)
                setattr(self, f"{name}_{suffix}", nn.Parameter(value, requires_grad=False))
        plain: dict[str, Any] = {
            "num_experts": E,
            "num_local_experts": E,
            "top_k": T,
            "activation": "silu",
            "is_gated": True,
            "inplace": True,
            "no_combine": False,
            "apply_router_weight_on_input": False,
            "routed_scaling_factor": None,
            "gemm1_alpha": None,
            "gemm1_clamp_limit": None,
            "swiglu_limit": None,
        }
        self.moe_runner_config = SimpleNamespace(**(plain | config))
        method: Any = object.__new__(METHODS[fmt.name])
        backend = SimpleNamespace(is_triton=lambda: True)
        method.runner = SimpleNamespace(runner_backend=backend, fused_func=object())
        method.is_compiled = False
        self.quant_method = method


def routes(M: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Weights FP32 and experts int32, each [M, T]; a token's experts differ."""
    random = torch.Generator().manual_seed(seed)
    weights = torch.rand(M, E, generator=random)
    chosen = weights.topk(T)
    return chosen.values / chosen.values.sum(-1, keepdim=True), chosen.indices.int()


def product(
    a: Tensor,
    weight: Tensor,
    bias: None,
    out: Tensor,
    a_scales: Tensor,
    scales: Tensor,
    zero_points: None,
    topk_weights: Tensor,
    topk_ids: Tensor,
    sorted_ids: Tensor,
    expert_ids: Tensor,
    used: Tensor,
    weighted: bool,
    top_k: int,
    config: dict[str, Any],
    *,
    block_shape: list[int],
    **options: Any,
) -> None:
    """``invoke_fused_moe_kernel``."""
    assert len(sorted_ids) >= int(used) >= topk_ids.numel() and len(expert_ids) > 0
    assert "USE_TMA" not in config and block_shape == [128, 128]
    assert options["use_fp8_w8a8"] and not options["filter_expert"]
    assert a.dtype == torch.float8_e4m3fn and a_scales.shape == (a.shape[0], a.shape[1] // 128)
    assert a_scales.is_contiguous()
    x = dequantize_activation(a, a_scales, torch.float64)
    rows_RN = out.view(topk_ids.numel(), -1)
    for r, expert in enumerate(topk_ids.flatten().tolist()):
        w = dequantize_weight(weight[expert], scales[expert], torch.float64)
        y = x[r // top_k] @ w.T
        rows_RN[r] = y * topk_weights.flatten()[r] if weighted else y


def align(topk_ids: Tensor, block: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """``moe_align_block_size``; what it leaves unwritten is garbage here."""
    R = topk_ids.numel()
    room = -(-(R + (experts + 1) * (block - 1)) // ROUNDED) * ROUNDED
    rows_P = torch.full((room,), 1 << 30, dtype=torch.int32)
    expert_B = torch.full((-(-room // block),), 99, dtype=torch.int32)
    used = 0
    for expert in range(-1, experts):
        mine = (topk_ids.flatten() == expert).nonzero().flatten().int()
        blocks = -(-len(mine) // block)
        expert_B[used // block : used // block + blocks] = expert
        rows_P[used : used + blocks * block] = R
        rows_P[used : used + len(mine)] = mine
        used += blocks * block
    return rows_P, expert_B, torch.tensor([used], dtype=torch.int32)


def grouped(a: Any, b: Any, out: Tensor, expert_P: Tensor) -> None:
    """``deep_gemm.m_grouped_fp8_gemm_nt_contiguous``."""
    assert type(a) is tuple and type(b) is tuple  # it refuses what is derived from one
    (codes, scales), (weight, weight_scales) = a, b
    assert len(codes) % 128 == 0 and scales.stride() == (1, len(codes)) and out.is_contiguous()
    for start in range(0, len(codes), 128):
        experts = set(expert_P[start : start + 128].tolist())
        assert len(experts) == 1
        expert = experts.pop()
        if expert < 0:
            continue  # what is there stays there
        part = slice(start, start + 128)
        # what lies at an empty place may be any bytes
        x = dequantize_activation(codes[part], scales[part].contiguous(), torch.float64)
        w = dequantize_weight(weight[expert], weight_scales[expert], torch.float64)
        out[part] = x @ w.T


def total(down: Tensor, out: Tensor, factor: float) -> None:
    """``moe_sum_reduce``, whose writes torch does not count."""
    before = out._version
    out.data.copy_(down.double().sum(1) * factor)
    assert out._version == before
