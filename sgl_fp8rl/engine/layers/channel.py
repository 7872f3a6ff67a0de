"""Layers in channel FP8 and INT8: SGLang's own ``w8a8_fp8`` and ``w8a8_int8`` on fixed storage.

SGLang's methods transpose the weight of a linear once it is loaded; here it stays ``[N, K]``, where
updates write, and each call is given the transposed view.
"""

from typing import Any, NamedTuple

import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.layers.layer_method import LayerMethod
from sgl_fp8rl.formats import CHANNEL_FP8, INT8
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.ops.channel import channel_linear


class _Transposed(NamedTuple):
    """What SGLang's ``apply`` reads of a layer."""

    weight: torch.Tensor
    """``[K, N]``."""
    weight_scale: torch.Tensor


class _Linear(LayerMethod):
    """Codes in ``weight`` [N, K], scales in ``weight_scale`` [N, 1] FP32."""

    format: WeightFormat

    def __init__(self, quant_config: Any, prefix: str) -> None:
        super().__init__(quant_config)  # type: ignore[call-arg]
        self.prefix = prefix
        self.quant_config = quant_config  # SGLang's DeepSeek and GLM read it of shared experts

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        cols, rows = input_size_per_partition, output_partition_sizes
        self.sizes, self.options = (cols, rows, *args), kwargs
        reason = self.format.refusal(rows, cols)
        if reason is not None:
            self.keep_bf16(layer, reason)
            return
        super().create_weights(layer, cols, rows, *args, **kwargs)  # type: ignore[misc]

    def process_weights_after_loading(self, layer: Any) -> None:
        """Nothing is repacked."""

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if layer.weight.device.type == "cpu":
            return channel_linear(x, layer.weight, layer.weight_scale, bias)
        seen = _Transposed(layer.weight.t(), layer.weight_scale)
        return super().apply(seen, x, bias)  # type: ignore[misc, no-any-return]


class FP8RLChannelLinearMethod(_Linear, compat.W8A8Fp8LinearMethod):  # type: ignore[misc]
    """Channel FP8."""

    format = CHANNEL_FP8


class FP8RLInt8LinearMethod(_Linear, compat.W8A8Int8LinearMethod):  # type: ignore[misc]
    """INT8."""

    format = INT8
