"""FP8 is for the layers of the language model: what else a model has keeps BF16.

Towers of vision and audio, projectors and resamplers cannot be told by their names, which SGLang's
models choose freely or leave empty. But a language model's layers attend over the KV cache, and no
tower does; so the model is built first.
"""

from typing import Any

from torch import nn

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.layers.linear import METHODS
from sgl_fp8rl.engine.layers.quant_config import FP8RLConfig

OUTSIDE = "outside of the language model's layers"


def keep_towers_bf16(
    original: Any, model_config: Any, load_config: Any, quant_config: Any = None
) -> nn.Module:
    """AROUND ``_initialize_model``: FP8 weights outside of the language model's layers become BF16,
    before any is loaded."""
    model: nn.Module = original(model_config, load_config, quant_config)
    if isinstance(quant_config, FP8RLConfig):
        inside = _in_language_layers(model)
        for module in model.modules():
            method: Any = getattr(module, "quant_method", None)
            # a model that attends elsewhere, as transformers' own code does, is FP8 as a whole
            if inside and module not in inside and type(method) in METHODS.values():
                method.keep_bf16(module, OUTSIDE)
    return model


def _in_language_layers(model: nn.Module) -> set[nn.Module]:
    """The modules of each list of layers of which one attends over the KV cache."""
    return {
        module
        for layers in model.modules()
        if isinstance(layers, nn.ModuleList) and any(map(_is_cached, layers.modules()))
        for module in layers.modules()
    }


def _is_cached(module: nn.Module) -> bool:
    """Encoders use the same class, without a cache."""
    return (
        isinstance(module, compat.RadixAttention)
        and module.attn_type != compat.AttentionType.ENCODER_ONLY
    )
