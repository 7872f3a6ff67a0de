"""Attention of a trainer that reads K and V as an engine's FP8 KV cache stores them.

Shape suffixes: B sequences, H KV heads, T tokens, D head dim, L layers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from sgl_fp8rl.ops.kv import kv_codes
from trainer_bridge import attention_hooks


class StoredKV:
    """The K and V of a layer as codes of the engine's cache; see ``sgl_fp8rl.kv_cache.scales``.

    As in the engine, attention computes with the codes, which BF16 and FP32 hold exactly, and the
    scales are factors of the softmax and of the result.

    Args:
        k_scale, v_scale: of all KV heads of the layer.
    """

    def __init__(self, k_scale: float, v_scale: float) -> None:
        self._scales = k_scale, v_scale
        attention_hooks.keep_installed()

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredKV, self._scales  # a model may be loaded in another process

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
        """Call one of transformers' attention functions; gradients pass straight through codes."""
        k_scale, v_scale = self._scales
        key, value = (
            _Codes.apply(x_BHTD, scale)  # type: ignore[no-untyped-call]
            for x_BHTD, scale in ((key_BHTD, k_scale), (value_BHTD, v_scale))
        )
        scaling = (query.shape[-1] ** -0.5 if scaling is None else scaling) * k_scale
        output, weights = attention(module, query, key, value, *args, scaling=scaling, **kwargs)
        return output * v_scale, weights


class _Codes(torch.autograd.Function):
    """``x / scale`` rounded to E4M3, in the dtype of x; its gradient is that of ``x / scale``."""

    @staticmethod
    def forward(ctx: Any, x_BHTD: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        scale_H = torch.full(x_BHTD.shape[1:2], scale, device=x_BHTD.device)
        return kv_codes(x_BHTD.transpose(1, 2), scale_H).to(x_BHTD.dtype).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient / ctx.scale, None


def read_as_stored(model: nn.Module, scales_L2: Sequence[tuple[float, float]] | None) -> None:
    """Have the attention of a transformers model read K and V as a cache stores them.

    Args:
        scales_L2: of K and V in each layer; None: as they are, which is how a model begins.

    Raises:
        ValueError: they are of a model with other layers.
    """
    layers = attention_hooks.attention_layers(model)
    if scales_L2 is not None and {*layers.values()} != {*range(len(scales_L2))}:
        raise ValueError(
            f"the KV scales are of {len(scales_L2)} layers, and the model has attention in "
            f"{len({*layers.values()})}; pass an engine of the model's checkpoint"
        )
    for module, layer in layers.items():
        if scales_L2 is None:
            vars(module).pop(attention_hooks.STORED, None)
        else:
            setattr(module, attention_hooks.STORED, StoredKV(*scales_L2[layer]))
