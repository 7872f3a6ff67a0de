"""Block-FP8 experts whose activations are quantized by their producers.

Large batches run on DeepGEMM (``grouped_experts``), all others on SGLang's own Triton kernel.

SGLang quantizes before each of the two GEMMs, in a separate launch. Here the codes of the first
come from the norm before the experts (``fusion``) and those of the second from the SiLU, so a layer
launches two kernels fewer and never stores ``silu(gate) * up`` in BF16. Routing, both GEMMs and the
sum over a token's experts are SGLang's; the bytes are identical (for few tokens SGLang sums with a
Triton kernel; here its CUDA kernel sums all batches).

Shape suffixes: M tokens, T experts per token, H hidden, I channels of each half of gate_up; R =
M * T rows, one for each token and expert.
"""

from collections.abc import Mapping
from typing import Any

import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.gemm.grouped_experts import grouped_experts, is_grouped
from sgl_fp8rl.engine.gemm.linear import quantized
from sgl_fp8rl.ops.activation import Quantized, detach
from sgl_fp8rl.ops.reference import BLOCK

BLOCK_SHAPE = [BLOCK, BLOCK]


def takes_codes(layer: Any) -> bool:
    """Whether the experts of ``layer`` (SGLang's ``FusedMoE``) run here for most batches."""
    config = layer.moe_runner_config
    runner = getattr(layer.quant_method, "runner", None)
    modifiers = ("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit")
    return (
        runner is not None
        and runner.runner_backend.is_triton()
        and runner.fused_func is not None  # no LoRA, and no tokens of other ranks
        and config.num_experts == config.num_local_experts
        and config.activation == "silu"
        and config.is_gated
        and all(getattr(config, name) is None for name in modifiers)
        and not config.apply_router_weight_on_input
        and not config.no_combine
        and not getattr(config, "silu_mul_keep_fp32", False)  # a newer SGLang's
        and (config.top_k or 0) > 2  # the sum kernel takes more than 2; None for some models
        and getattr(layer, "w13_weight_bias", None) is None
        and not compat.get_exec().moe.enable_fused_moe_sum_all_reduce
        and not compat.get_exec().comm.enable_symm_mem  # the sum would need special memory
    )


def fits(x_MH: torch.Tensor) -> bool:
    """Whether the kernels support this batch."""
    return (
        not torch.compiler.is_compiling()
        and x_MH.dtype == torch.bfloat16
        and x_MH.numel() > 0
        and x_MH.is_contiguous()
    )


def experts(
    layer: Any, x_MH: torch.Tensor, topk_weights_MT: torch.Tensor, topk_ids_MT: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each token's experts.

    Args:
        layer: one that ``takes_codes``.
        x_MH: one that ``fits``.
        topk_weights_MT: FP32.
        topk_ids_MT: int32.

    Returns:
        BF16 ``[M, H]``: x itself if SGLang's layer works in place.
    """
    config = layer.moe_runner_config
    power_of_two = layer.quant_method.format.power_of_two_scales
    tokens = quantized(x_MH, x_MH, by_row=True, power_of_two=power_of_two)
    if config.inplace:
        detach(x_MH)  # torch does not see the kernels write
    out_MH = x_MH if config.inplace else torch.empty_like(x_MH)
    factor = 1.0 if config.routed_scaling_factor is None else config.routed_scaling_factor
    run = grouped_experts if is_grouped(layer, *topk_ids_MT.shape) else _tiled_experts
    return run(layer, tokens, topk_weights_MT, topk_ids_MT, factor, out_MH)


def _tiled_experts(
    layer: Any,
    tokens: Quantized,
    topk_weights_MT: torch.Tensor,
    topk_ids_MT: torch.Tensor,
    factor: float,
    out_MH: torch.Tensor,
) -> torch.Tensor:
    from sgl_kernel import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
        moe_sum_reduce,  # loads on a GPU only
    )

    from sgl_fp8rl.ops.activation_triton import silu_mul_codes  # Triton, and a GPU

    w13, w2 = layer.w13_weight, layer.w2_weight
    M, T = topk_ids_MT.shape
    up_tiles, down_tiles = _tiles(w13.shape, w2.shape, T, M)
    routes = (
        topk_weights_MT,
        topk_ids_MT,
        *compat.moe_align_block_size(topk_ids_MT, up_tiles["BLOCK_SIZE_M"], w13.shape[0]),
    )
    gate_up_R2I = out_MH.new_empty((M * T, w13.shape[1]))
    expert_gemm(tokens, w13, layer.w13_weight_scale_inv, gate_up_R2I, routes, T, up_tiles)
    power_of_two = layer.quant_method.format.power_of_two_scales
    hidden = silu_mul_codes(gate_up_R2I, by_row=True, power_of_two=power_of_two)
    del gate_up_R2I  # most of a prefill's memory; free it for what follows
    down_MTH = out_MH.new_empty((M, T, w2.shape[1]))
    expert_gemm(hidden, w2, layer.w2_weight_scale_inv, down_MTH, routes, 1, down_tiles)
    moe_sum_reduce(down_MTH, out_MH, factor)
    return out_MH


def _tiles(
    w13_shape: torch.Size, w2_shape: torch.Size, T: int, M: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """SGLang's Triton tiles for the two GEMMs of M tokens; they share ``BLOCK_SIZE_M``."""
    up, (down, _) = compat.try_get_optimal_moe_config(
        w13_shape,
        w2_shape,
        T,
        "fp8_w8a8",
        M,
        block_shape=BLOCK_SHAPE,
        return_down_config=True,
    )
    return _in_one_block(up), _in_one_block(down or up)


def _in_one_block(config: dict[str, Any]) -> dict[str, Any]:
    """The same tiles, limited to the channels that share one scale.

    SGLang's kernel applies the first of two scales to both halves of a larger tile, and a file of
    0.5.17 and 0.5.23 has such tiles (512 experts of 256 channels on an H100).
    """
    return config if config["BLOCK_SIZE_K"] <= BLOCK else {**config, "BLOCK_SIZE_K": BLOCK}


def expert_gemm(
    a: Quantized,
    weight_ENK: torch.Tensor,
    scales_Enk: torch.Tensor,
    out: torch.Tensor,
    routes: tuple[torch.Tensor, ...],
    rows_of_token: int,
    config: Mapping[str, Any],
) -> None:
    """Multiply each row of ``a`` by its experts into ``out``; the second GEMM applies the weights.

    Args:
        rows_of_token: how many rows of ``out`` read one row of ``a``.
    """
    import triton.language as tl

    down = rows_of_token == 1
    options = {name: value for name, value in config.items() if name != "USE_TMA"}
    compat.invoke_fused_moe_kernel(
        a.codes_MK,
        weight_ENK,
        None,
        out,
        a.scales_Mk,
        scales_Enk,
        None,
        *routes,
        down,
        rows_of_token,
        options,
        compute_type=tl.bfloat16,
        use_fp8_w8a8=True,
        use_int8_w8a8=False,
        use_int8_w8a16=False,
        use_int4_w4a16=False,
        per_channel_quant=False,
        block_shape=BLOCK_SHAPE,
        b_use_tma=config.get("USE_TMA", False),
        filter_expert=False,
    )
