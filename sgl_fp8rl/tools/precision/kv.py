"""Make the attention of a transformers model read K and V as from an FP8 KV cache."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sgl_fp8rl.ops.kv import kv_codes
from sgl_fp8rl.tools.precision.tokens import Sequences
from trainer_bridge.kv.kv_calibrator import KVCalibrator


@torch.inference_mode()
def layer_scales(model: Any, batches: list[Sequences]) -> torch.Tensor:
    """One scale for K and one for V of each layer, calibrated on these sequences as for an update.

    Returns:
        FP32 ``[layers, 2]``.

    Raises:
        ValueError: K or V is NaN or Inf, or the model's attention cannot be observed.
    """
    calibrator = KVCalibrator.of(model)
    with calibrator.watch(model):
        for batch in batches:
            model.get_decoder()(batch.tokens_BL, attention_mask=batch.mask_BL, use_cache=False)
    return calibrator.scales().amax(-1)


@contextmanager
def rounded(scales_L2: torch.Tensor) -> Iterator[None]:
    """Replace K and V by codes times scale in the attention of every model in this context."""
    from transformers.modeling_utils import AttentionInterface

    original = AttentionInterface.get_interface
    AttentionInterface.get_interface = _rounding(original, scales_L2)
    try:
        yield
    finally:
        AttentionInterface.get_interface = original


def _rounding(get_interface: Callable[..., Any], scales_L2: torch.Tensor) -> Callable[..., Any]:
    @functools.wraps(get_interface)
    def get_rounding(*args: Any, **kwargs: Any) -> Any:
        attend = get_interface(*args, **kwargs)

        @functools.wraps(attend)
        def attend_rounded(
            module: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            k_scale, v_scale = scales_L2[module.layer_idx]
            key, value = read_back(key, k_scale), read_back(value, v_scale)
            return attend(module, query, key, value, *args, **kwargs)

        return attend_rounded

    return get_rounding


def read_back(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``code * scale`` in the dtype of x, with one scale for all elements."""
    return (kv_codes(x, scale.expand(1)).float() * scale).to(x.dtype)
