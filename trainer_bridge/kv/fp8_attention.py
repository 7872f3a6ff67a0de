"""Attention of a trainer with K and V fake-quantized: as an engine's 8-bit KV cache stores them.

Shape suffixes: B sequences, H KV heads, T tokens, D head dim, L layers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from sgl_fp8rl.ops.kv import kv_codes
from sgl_fp8rl.ops.kv_int8 import rotate, token_codes
from trainer_bridge.engines.engine_client import check_fields
from trainer_bridge.kv import attention_hooks

KVScales: TypeAlias = tuple[tuple[float, float], ...]
"""Of K and V in each layer of an E4M3 cache, of all heads."""


class FakeQuantizedKV:
    """Attention of a layer over K and V as its cache stores them.

    E4M3 (``receiver/kv/scales.py``): as in the engine, attention computes with the codes, which
    BF16 and FP32 hold exactly, and the scales are factors of the softmax and of the result.

    INT8 (``sgl_fp8rl.ops.kv_int8``): attention to the values of the codes. K is rotated back, so Q
    stays as it is. BF16 does not hold the values as exactly as the engine does; the rounding is as
    large as that of K and V before they were quantized.

    Args:
        scales: of all KV heads, for K and V; None of an INT8 cache.
        dtype: the engine's, to which K and V are rounded before.
    """

    def __init__(self, scales: tuple[float, float] | None, dtype: torch.dtype) -> None:
        self._scales, self._dtype = self.made_of = scales, dtype

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
        """Call one of transformers' attention functions."""
        if self._scales is not None and query.dtype == torch.float16:
            raise ValueError(
                "attention with K and V of an FP8 cache is computed in BF16 or FP32; load the "
                "model in BF16"
            )
        k_scale, v_scale = self._scales or (1.0, 1.0)
        key = _Stored.apply(key_BHTD, self._stored, k_scale, True)  # type: ignore[no-untyped-call]
        value = _Stored.apply(  # type: ignore[no-untyped-call]
            value_BHTD, self._stored, v_scale, False
        )
        scaling = (query.shape[-1] ** -0.5 if scaling is None else scaling) * k_scale
        output, weights = attention(module, query, key, value, *args, scaling=scaling, **kwargs)
        return (output if self._scales is None else output * v_scale), weights

    def _stored(self, x_BHTD: torch.Tensor, scale: float, is_key: bool) -> torch.Tensor:
        """``x / scale`` rounded to E4M3, or the value of x's INT8 code."""
        x_BHTD = x_BHTD.to(self._dtype)
        if self._scales is None:
            codes_BHTD, scale_BHT = token_codes(x_BHTD, rotated=is_key)
            values_BHTD = codes_BHTD * scale_BHT[..., None]
            return rotate(values_BHTD) if is_key else values_BHTD
        scale_H = torch.full(x_BHTD.shape[1:2], scale, dtype=torch.float32, device=x_BHTD.device)
        return kv_codes(x_BHTD.transpose(1, 2), scale_H).transpose(1, 2)


class _Stored(torch.autograd.Function):
    """``FakeQuantizedKV._stored``, in the dtype of x, with a straight-through gradient: that of
    ``x / scale``."""

    @staticmethod
    def forward(
        ctx: Any, x_BHTD: torch.Tensor, stored: Callable[..., Any], scale: float, is_key: bool
    ) -> torch.Tensor:
        ctx.scale = scale
        return stored(x_BHTD, scale, is_key).to(x_BHTD.dtype)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return (gradient if ctx.scale == 1.0 else gradient / ctx.scale), None, None, None


def fake_quantize_kv(
    model: nn.Module,
    scales_L2: Sequence[tuple[float, float] | None] | None,
    dtype: torch.dtype,
) -> None:
    """Have the attention of a transformers model fake-quantize K and V.

    Args:
        scales_L2: of K and V in each layer of an E4M3 cache, each None of an INT8 cache, which has
            no scales of layers; None: K and V stay as they are, as in a new model.
    """
    layers = attention_hooks.attention_layers(model)
    found = sorted({*layers.values()})
    if scales_L2 is not None and found != [*range(len(scales_L2))]:
        raise ValueError(
            f"the engine's KV cache has layers 0 to {len(scales_L2) - 1}, and the model has "
            f"attention in layers {found}; pass an engine of the model's checkpoint"
        )
    attention_hooks.install()
    name = attention_hooks.FAKE_QUANTIZED
    for module, layer in layers.items():
        if scales_L2 is None:
            vars(module).pop(name, None)
            continue
        kv, before = FakeQuantizedKV(scales_L2[layer], dtype), vars(module).get(name)
        if before is None or before.made_of != kv.made_of:  # a compiled model is compiled anew
            setattr(module, name, kv)


def scales_in(whose: str, reply: dict[str, Any]) -> KVScales | None:
    """What an engine of an E4M3 cache answers to the control message ``kv``; None while the scales
    wait to be measured.

    Raises:
        EngineError: they are not such scales.
    """
    if reply.get("pending") is True:
        return None
    rows: Any = reply.get("scales")
    try:
        scales = tuple((float(max(k)), float(max(v))) for k, v in rows)
    except (TypeError, ValueError):
        scales = ()
    sound = len(scales) > 0 and all(0 < each < math.inf for pair in scales for each in pair)
    check_fields(f"the reply of {whose}", reply, {"scales": sound})
    return scales


def attend_as_sampled(model: nn.Module, scales_B: Sequence[KVScales | None]) -> None:
    """Have a model of ``fp8_forward`` attend under the scales that rows were sampled under, until
    it gets others: checkpointed activations are computed again in backward. Another model, and rows
    of unknown scales, change nothing.

    Raises:
        ValueError: rows differ in them, or they are of other layers than the model's.
    """
    kinds = {scales for scales in scales_B if scales is not None}
    if not kinds:
        return
    codes = (vars(module).get("fp8_parameters", {}) for module in model.modules())
    dtype = next((each.dtype for found in codes for each in found.values()), None)
    if dtype is None:
        return
    if len(kinds) > 1:
        raise ValueError(
            f"the rows were sampled under {len(kinds)} sets of KV scales, as engines measure them; "
            f"give kv_scales to update, so that all have the same, or pass "
            f"dataclasses.replace(rollout, kv_scales=None), and the model keeps its own"
        )
    fake_quantize_kv(model, kinds.pop(), dtype)
