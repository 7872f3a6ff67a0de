"""Attention of a trainer with K and V fake-quantized: as an engine's 8-bit KV cache stores them.

Shape suffixes: B sequences, H KV heads, T tokens, D head dim, L layers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from sgl_fp8rl.ops.kv import kv_codes
from sgl_fp8rl.ops.kv_int8 import rotate, token_codes
from trainer_bridge.kv import attention_hooks


class FakeQuantizedE4M3:
    """The scales of a layer's K and V, and attention under them; see ``receiver/kv/scales.py``.

    As in the engine, attention computes with the codes, which BF16 and FP32 hold exactly, and the
    scales are factors of the softmax and of the result.

    Args:
        k_scale, v_scale: of all KV heads of the layer.
        dtype: the engine's, to which K and V are rounded before.
    """

    def __init__(self, k_scale: float, v_scale: float, dtype: torch.dtype) -> None:
        self._k_scale, self._v_scale, self._dtype = k_scale, v_scale, dtype

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(
        self,
        attention: Callable[..., Any],
        module: nn.Module,
        query: torch.Tensor,
        key_BHTD: torch.Tensor,
        value_BHTD: torch.Tensor,
        *args: Any,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Call one of transformers' attention functions.

        Raises:
            ValueError: in FP16, whose products of Q and codes may overflow.
        """
        if query.dtype == torch.float16:
            raise ValueError(
                "attention with K and V of an FP8 cache is computed in BF16 or FP32; load the "
                "model in BF16"
            )
        key, value = (
            _Codes.apply(x_BHTD, scale, self._dtype)  # type: ignore[no-untyped-call]
            for x_BHTD, scale in ((key_BHTD, self._k_scale), (value_BHTD, self._v_scale))
        )
        scaling = (query.shape[-1] ** -0.5 if scaling is None else scaling) * self._k_scale
        output, weights = attention(module, query, key, value, *args, scaling=scaling, **kwargs)
        return output * self._v_scale, weights


class _Codes(torch.autograd.Function):
    """``x / scale`` rounded to E4M3, in the dtype of x, with a straight-through gradient: that of
    ``x / scale``."""

    @staticmethod
    def forward(ctx: Any, x_BHTD: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
        ctx.scale = scale
        scale_H = torch.full(x_BHTD.shape[1:2], scale, dtype=torch.float32, device=x_BHTD.device)
        codes = kv_codes(x_BHTD.to(dtype).transpose(1, 2), scale_H)
        return codes.to(x_BHTD.dtype).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient / ctx.scale, None, None


class FakeQuantizedINT8:
    """Attention to the values of INT8 codes; see ``sgl_fp8rl.ops.kv_int8``.

    K is rotated back, so Q stays as it is. BF16 does not hold the values as exactly as the engine
    does; the rounding is as large as that of K and V before they were quantized.

    Args:
        dtype: the engine's, to which K and V are rounded before.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(
        self,
        attention: Callable[..., Any],
        module: nn.Module,
        query: torch.Tensor,
        key_BHTD: torch.Tensor,
        value_BHTD: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Call one of transformers' attention functions."""
        key, value = (
            _Values.apply(x_BHTD, is_key, self._dtype)  # type: ignore[no-untyped-call]
            for x_BHTD, is_key in ((key_BHTD, True), (value_BHTD, False))
        )
        return attention(module, query, key, value, *args, **kwargs)  # type: ignore[no-any-return]


class _Values(torch.autograd.Function):
    """What an INT8 cache holds of x, in the dtype of x, with a straight-through gradient: that of
    x."""

    @staticmethod
    def forward(ctx: Any, x_BHTD: torch.Tensor, is_key: bool, dtype: torch.dtype) -> torch.Tensor:
        codes_BHTD, scale_BHT = token_codes(x_BHTD.to(dtype), rotated=is_key)
        values_BHTD = codes_BHTD * scale_BHT[..., None]
        return (rotate(values_BHTD) if is_key else values_BHTD).to(x_BHTD.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient, None, None


def fake_quantize_kv(
    model: nn.Module,
    scales_L2: Sequence[tuple[float, float] | None] | None,
    dtype: torch.dtype,
) -> None:
    """Have the attention of a transformers model fake-quantize K and V.

    Args:
        scales_L2: of K and V in each layer of an E4M3 cache, each None of an INT8 cache, which has
            no scales of layers; None: K and V stay as they are, as in a new model.
        dtype: the engine's.

    Raises:
        ValueError: they are of a model with other layers.
    """
    layers = attention_hooks.attention_layers(model)
    found = sorted({*layers.values()})
    if scales_L2 is not None and found != [*range(len(scales_L2))]:
        raise ValueError(
            f"the engine's KV cache has layers 0 to {len(scales_L2) - 1}, and the model has "
            f"attention in layers {found}; pass an engine of the model's checkpoint"
        )
    attention_hooks.install()
    for module, layer in layers.items():
        if scales_L2 is None:
            vars(module).pop(attention_hooks.FAKE_QUANTIZED, None)
        else:
            scales = scales_L2[layer]
            kv = FakeQuantizedE4M3(*scales, dtype) if scales else FakeQuantizedINT8(dtype)
            setattr(module, attention_hooks.FAKE_QUANTIZED, kv)
