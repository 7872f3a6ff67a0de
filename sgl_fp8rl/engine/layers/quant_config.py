"""``--quantization fp8rl``: which layer is quantized, and why each other one is not.

SGLang's own methods do the work; parameters are codes from their creation on, and BF16
checkpoints and updates are quantized on the way in (``sgl_fp8rl.receiver``).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from server_args import matches
from sgl_fp8rl.constants import NAME
from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.layers import linear, moe
from sgl_fp8rl.engine.layers.quant_name import overrides
from sgl_fp8rl.formats import BLOCK_FP8, FORMATS, UNQUANTIZED, stored_format
from sgl_fp8rl.formats.padding import padding_of
from sgl_fp8rl.options import current_options

ABSORBED = "kv_b_proj"
"""MLA's projection of latents to keys and values: decode attends with BF16 copies of its rows, so
an FP8 one would save nothing there, and prefill would attend with other weights than decode."""


OUTSIDE = "outside of the language model's layers"


@dataclass(frozen=True)
class LayerFormat:
    """How one layer of the engine keeps its weights."""

    name: str
    """The layer's name inside the engine, such as ``model.layers.0.self_attn.qkv_proj``."""
    format: str
    """The name of its weight format, such as ``block-fp8`` or ``bf16``."""
    reason: str | None
    """Why the layer is not quantized; None where it is."""
    shape: tuple[int, ...]
    """As stored on this rank: ``(N, K)``, or ``(experts, N, K)`` of the first expert matrix."""
    unpadded: tuple[int, ...] | None = None
    """``shape`` without padding; None where it has none."""
    padding_bytes: int = 0
    """Bytes of codes that are padding."""


class FP8RLConfig(compat.Fp8Config):  # type: ignore[misc]
    """Quantized in the engine: block FP8 (128x128 weights, 1x128 activations, FP32 scales)."""

    def __init__(self, ignored_layers: list[str] | None = None, **_: Any) -> None:
        super().__init__(
            is_checkpoint_fp8_serialized=True,
            activation_scheme="dynamic",
            ignored_layers=ignored_layers,
            weight_block_size=list(BLOCK_FP8.block),
        )
        options = current_options()
        self.patterns = (*options.ignored_layers, *self.ignored_layers)
        self.ragged = options.ragged
        """What becomes of layers whose sides are not multiples of 128."""
        self.format = FORMATS[options.format]
        """What layers are kept in."""
        if torch.cuda.is_available():
            refused = self.format.why_not_on(torch.cuda.get_device_capability())
            if refused is not None:
                raise ValueError(f"this GPU has no kernels: {refused}; use another GPU")

    override_quantization_method = staticmethod(overrides)

    def get_name(self) -> str:
        return NAME

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "FP8RLConfig":
        """Read the ``quantization_config`` of a block-FP8 checkpoint.

        Raises:
            ValueError: the checkpoint's FP8 is not 128x128 blocks with dynamic activations, or the
                engine's format another one.
        """
        block = config.get("weight_block_size")
        scheme = config.get("activation_scheme", "dynamic")
        is_fp8 = config.get("quant_method") == "fp8"
        if not is_fp8 or block != list(BLOCK_FP8.block) or scheme != "dynamic":
            raise ValueError(
                f"quantization fp8rl reads BF16 checkpoints and FP8 ones with 128x128 blocks and "
                f"dynamic activations, but this checkpoint's quantization_config is {config}; "
                f"start from the BF16 checkpoint"
            )
        ignored = config.get("ignored_layers") or config.get("modules_to_not_convert")
        made = cls(ignored_layers=list(ignored or ()))
        scales = made.format.checkpoint.get("scale_fmt")
        if scales not in (None, config.get("scale_fmt")):
            raise ValueError(
                f"fp8rl-format {made.format.name} is quantized from BF16 weights, but this "
                f"checkpoint is block FP8 with scale_fmt {config.get('scale_fmt')}; start from the "
                f"BF16 checkpoint"
            )
        return made

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if isinstance(layer, compat.LinearBase):
            reason = self._why_not(prefix)
            if reason is None and layer.params_dtype != torch.get_default_dtype():
                reason = f"it computes in {layer.params_dtype}"  # as some routers do
            if reason is None:
                return linear.METHODS[self.format.name](self, prefix)
            layer.fp8rl_reason = reason
            return compat.UnquantizedLinearMethod()
        if isinstance(layer, compat.FusedMoE):
            reason = self._why_not(prefix)
            if reason is None:
                _, reason = moe.fit(layer, pads=self.ragged == "pad")
            if reason is None:
                return moe.METHODS[self.format.name](self, prefix)
            layer.fp8rl_reason = reason
            return compat.UnquantizedFusedMoEMethod(
                layer.use_triton_kernels, layer.use_flashinfer_trtllm_moe
            )
        return None

    def _why_not(self, prefix: str) -> str | None:
        if prefix.rpartition(".")[2] == ABSORBED:
            return "MLA absorbs it into its attention in BF16"
        for pattern in self.patterns:
            if matches(pattern, prefix):
                return f"ignored by {pattern!r}"
        return None


def keep_towers_bf16(
    original: Any, model_config: Any, load_config: Any, quant_config: Any = None
) -> nn.Module:
    """AROUND ``_initialize_model``: FP8 weights outside of the language model's layers become BF16,
    before any is loaded.

    Towers of vision and audio, projectors and resamplers cannot be told by their names, which
    SGLang's models choose freely or leave empty. But a language model's layers attend over the KV
    cache, and no tower does; so the model is built first.
    """
    model: nn.Module = original(model_config, load_config, quant_config)
    if isinstance(quant_config, FP8RLConfig):
        inside = _in_language_layers(model)
        for module in model.modules():
            method: Any = getattr(module, "quant_method", None)
            # a model that attends elsewhere, as transformers' own code does, is FP8 as a whole
            if inside and module not in inside and type(method) in linear.METHODS.values():
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


def list_layers(model: nn.Module) -> list[LayerFormat]:
    """Each linear, expert group, embedding and head of the model, with its format and reason."""
    layers = []
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        attribute = "weight" if own.get("weight") is not None else "w13_weight"
        weight = own.get(attribute)
        if weight is None or weight.dim() < 2:
            continue
        format_, shape, padding = stored_format(weight), weight.shape, padding_of(weight)
        reason = None
        if format_ is UNQUANTIZED:
            reason = getattr(module, "fp8rl_reason", None) or _kind_reason(name, module)
        unpadded = None if padding is None else (*shape[:-2], *padding.unpadded)
        zeros = sum(map(_padding_bytes, own.values()))
        layers.append(LayerFormat(name, format_.name, reason, tuple(shape), unpadded, zeros))
    return layers


def _padding_bytes(parameter: nn.Parameter) -> int:
    padding, size = padding_of(parameter), parameter.nbytes
    if padding is None:
        return 0
    return size - size // math.prod(padding.shape) * math.prod(padding.unpadded)


def _kind_reason(name: str, module: nn.Module) -> str:
    if isinstance(module, (compat.LinearBase, nn.Linear)) or name.endswith(".gate"):
        return "router or other layer that the model builds without quantization"
    if "lm_head" in name:
        return "output head stays BF16"
    if "embed" in name:
        return "embedding stays BF16"
    return "not a linear layer"
