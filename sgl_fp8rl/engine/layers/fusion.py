"""Quantize activations in their producers: the norms and SiLU that feed our FP8 layers.

A producer still returns SGLang's BF16 tensor for its other readers, such as the router of experts;
the FP8 layer finds codes and scales attached to it (``activation.attached``). A wrong guess about
which producer feeds which layer costs only time: a layer that finds nothing quantizes its input.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.gemm import experts
from sgl_fp8rl.engine.layers.linear import FP8RLLinearMethod
from sgl_fp8rl.engine.layers.moe import FP8RLMoEMethod
from sgl_fp8rl.ops.activation import Channels, attach, detach
from sgl_fp8rl.ops.reference import BLOCK

logger = logging.getLogger(__name__)

_FEEDS = {
    "input_layernorm": ("self_attn.qkv_proj",),
    "post_attention_layernorm": ("mlp.gate_up_proj", "mlp.experts"),
    "act_fn": ("down_proj",),
}
"""Names of producers in a module, and of the layers there that may read their results."""


def fuse(model: nn.Module) -> int:
    """Make producers quantize for the FP8 layers that they feed.

    Changes nothing on CPUs, and where SGLang uses another forward than its CUDA kernels (for
    deterministic or on-policy runs). Call it once, after the linears have their kernel
    (``startup``) and before CUDA graphs are captured.

    Returns:
        The number of producers that quantize now.
    """
    count = 0
    for name, module in model.named_modules():
        for producer_name, consumer_names in _FEEDS.items():
            producer = getattr(module, producer_name, None)
            consumers = [path for path in consumer_names if _takes_codes(_find(module, path))]
            if producer is None or not consumers:
                continue
            method = _find(module, consumers[0]).quant_method
            forward = _fused_forward(
                producer,
                by_row=consumers == ["mlp.experts"],
                within=getattr(method, "within", None),
                power_of_two=method.format.power_of_two_scales,
            )
            if forward is not None:
                producer._forward_method = forward
                logger.debug("%s.%s quantizes for %s", name, producer_name, consumers[0])
                count += 1
    logger.info("%d norms and SiLUs quantize the activations that they produce", count)
    return count


def _find(module: nn.Module, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _takes_codes(layer: Any) -> bool:
    method = getattr(layer, "quant_method", None)
    if isinstance(method, FP8RLMoEMethod):
        return experts.takes_codes(layer)
    # A layer without a kernel runs SGLang's own operator, which quantizes its input.
    return isinstance(method, FP8RLLinearMethod) and method.kernel is not None


def _fused_forward(
    producer: Any, *, by_row: bool, within: Channels | None, power_of_two: bool
) -> Callable[..., Any] | None:
    """The replacement for the producer's CUDA kernel, or None to keep that."""
    if type(producer) not in (compat.RMSNorm, compat.SiluAndMul):
        return None  # Gemma's norms and other activations compute something else
    # Newer versions resolve it on the first call.
    original = producer._forward_method or producer._resolve_forward_method()
    if original != producer.forward_cuda:
        return None
    options = {"within": within, "power_of_two": power_of_two}
    if type(producer) is compat.SiluAndMul:
        return _fused_silu_mul(original, options)
    weight = producer.weight
    plain = (
        producer.variance_size_override is None
        and not producer.cast_x_before_out_mul
        and not producer.fp32_residual
        and producer.override_orig_dtype is None
        and weight.dtype == torch.bfloat16
        and (within is not None or weight.numel() % BLOCK == 0)
    )
    return _fused_norm(original, producer, {**options, "by_row": by_row}) if plain else None


def _fused_norm(
    original: Callable[..., Any], norm: Any, options: dict[str, Any]
) -> Callable[..., Any]:
    """``RMSNorm.forward_cuda``; unusual calls go to the original."""
    from sgl_fp8rl.ops.activation_triton import rms_norm_quantize

    def forward(
        x: torch.Tensor, residual: torch.Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        extra = any(value is not None for value in (*args, *kwargs.values()))
        if extra or not _is_plain(x) or not (residual is None or _matches(residual, x)):
            return _unfused(original, x, residual, *args, **kwargs)
        weight, eps = norm.weight.data, norm.variance_epsilon
        y, quantized = rms_norm_quantize(x, weight, eps, residual, **options)
        attach(y, quantized, options["within"])
        return y if residual is None else (y, residual)

    return forward


def _fused_silu_mul(original: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """``SiluAndMul.forward_cuda``; unusual calls go to the original."""
    from sgl_fp8rl.ops.activation_triton import silu_mul_quantize

    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        whole = options["within"] is not None or x.shape[-1] % (2 * BLOCK) == 0
        if args or kwargs or not _is_plain(x) or not whole:
            return _unfused(original, x, *args, **kwargs)
        y, quantized = silu_mul_quantize(x, **options)
        attach(y, quantized, options["within"])
        return y

    return forward


def _unfused(original: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        detach(x)  # the original may write into x, which torch does not count
    return original(x, *args, **kwargs)


def _is_plain(x: torch.Tensor) -> bool:
    return (
        # First, since a compiler must not trace the rest.
        not torch.compiler.is_compiling()
        and x.dtype == torch.bfloat16
        and x.dim() == 2
        and x.numel() > 0
        and x.is_contiguous()
        # Nothing can be attached without a version counter.
        and not x.is_inference()
        and not torch.is_inference_mode_enabled()
        and not compat.is_batch_invariant_mode_enabled()
    )


def _matches(residual: torch.Tensor, x: torch.Tensor) -> bool:
    return residual.dtype == x.dtype and residual.shape == x.shape and residual.is_contiguous()
