"""The quantized experts: SGLang's own methods on storage whose addresses never change."""

from functools import partial
from typing import Any

import torch
from torch import nn

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.gemm.experts import experts, fits, takes_codes
from sgl_fp8rl.engine.layers.linear import check_activations, check_stock_kernels, keep_storage
from sgl_fp8rl.formats import BLOCK_FP8, BLOCK_FP8_UE8M0, mark
from sgl_fp8rl.formats.padding import Padding, Shard, fit_experts, pad_storage
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.ops.activation import detach
from sgl_fp8rl.ops.reference import fp8_experts, fp8_linear


class FP8RLMoEMethod(compat.Fp8MoEMethod):  # type: ignore[misc]
    """Codes in ``w13_weight`` [E, 2I, H] and ``w2_weight`` [E, H, I], scales beside them; I with
    its padding."""

    format: WeightFormat = BLOCK_FP8

    def __init__(self, quant_config: Any, prefix: str) -> None:
        super().__init__(quant_config)
        self.prefix = prefix
        self.is_compiled = False
        """Whether ``grouped_experts`` has its kernels; SGLang's Triton kernel runs without."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        check_activations(self.format, kwargs.get("params_dtype"))
        paddings, _ = fit(layer, pads=True)
        size = intermediate_size_per_partition
        if paddings is not None:
            up, down = paddings
            size = layer.moe_runner_config.intermediate_size_per_partition = down.cols.size
            layer.intermediate_size_per_partition = size  # CUTLASS takes its strides from here
        super().create_weights(layer, num_experts, hidden_size, size, *args, **kwargs)
        if paddings is not None:
            pad_storage(layer.w13_weight, layer.w13_weight_scale_inv, up, BLOCK_FP8.block)
            pad_storage(layer.w2_weight, layer.w2_weight_scale_inv, down, BLOCK_FP8.block)
        for weight in (layer.w13_weight, layer.w2_weight):
            mark(weight, self.format)

    def process_weights_after_loading(self, layer: Any) -> None:
        keep_storage(super().process_weights_after_loading, layer, self.prefix)

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        x = dispatch_output.hidden_states
        on_cpu = layer.w13_weight.device.type == "cpu"
        if not on_cpu and not (fits(x) and takes_codes(layer)):
            check_stock_kernels(self.format)
            if not torch.compiler.is_compiling():
                detach(x)  # SGLang may write into x, which torch does not count
            return super().apply(layer, dispatch_output)
        topk_weights, topk_ids, _ = dispatch_output.topk_output
        run: Any = experts
        if on_cpu:
            run = partial(experts_reference, power_of_two=self.format.power_of_two_scales)
        return compat.StandardCombineInput(hidden_states=run(layer, x, topk_weights, topk_ids))


class FP8RLUE8M0MoEMethod(FP8RLMoEMethod):
    """With scales that are powers of two, of the activations too."""

    format = BLOCK_FP8_UE8M0


def fit(layer: Any, *, pads: bool) -> tuple[tuple[Padding, Padding] | None, str | None]:
    """The paddings of ``w13`` and ``w2``, if they need any, or why the experts cannot be FP8.

    Args:
        layer: SGLang's ``FusedMoE``, before it has weights.
        pads: whether padding is allowed.
    """
    hidden, size = layer.hidden_size, layer.intermediate_size_per_partition
    reason = BLOCK_FP8.refusal([size], hidden)
    paddings = None
    if reason and pads and layer.moe_runner_config.is_gated and not layer.with_bias:
        shard = Shard(size, layer.moe_tp_rank, layer.moe_tp_size)
        paddings, reason = fit_experts(BLOCK_FP8, hidden, shard)
    return paddings, reason and f"expert {reason}"


METHODS: dict[str, Any] = {
    BLOCK_FP8.name: FP8RLMoEMethod,
    BLOCK_FP8_UE8M0.name: FP8RLUE8M0MoEMethod,
}
"""By format: what computes in a layer of experts."""


_ACTIVATIONS: dict[str, Any] = {"silu": nn.functional.silu, "gelu": nn.functional.gelu}


def experts_reference(
    layer: Any,
    x_MH: torch.Tensor,
    topk_weights_MT: torch.Tensor,
    topk_ids_MT: torch.Tensor,
    factor: float = 1.0,
    *,
    power_of_two: bool = False,
) -> torch.Tensor:
    """The experts of an engine's layer, in the torch reference.

    Args:
        factor: of the sum. Not the layer's own: on a CPU SGLang's models apply that themselves.
        power_of_two: the scales of activations are powers of two.

    Returns:
        ``[M, H]`` in the dtype of ``x_MH``; the weighted sum is taken in FP32.
    """
    config = layer.moe_runner_config
    if config.activation not in _ACTIVATIONS or config.apply_router_weight_on_input:
        raise NotImplementedError(
            f"experts with activation {config.activation!r} and apply_router_weight_on_input="
            f"{config.apply_router_weight_on_input} have no CPU reference; run them on a GPU"
        )
    out_MH = fp8_experts(
        x_MH,
        (layer.w13_weight, layer.w13_weight_scale_inv),
        (layer.w2_weight, layer.w2_weight_scale_inv),
        topk_weights_MT,
        topk_ids_MT,
        _ACTIVATIONS[config.activation],
        partial(fp8_linear, power_of_two=power_of_two),
    )
    return (factor * out_MH).to(x_MH.dtype)
