"""What a start says of an fp8rl engine."""

import logging
from collections import Counter
from typing import Any

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.control.attached import weights_of
from sgl_fp8rl.engine.cpu import cpu_platform
from sgl_fp8rl.engine.layers.quant_config import LayerFormat, list_layers
from sgl_fp8rl.formats import UNQUANTIZED, counted
from sgl_fp8rl.receiver.kv.quantized import QuantizedKV
from sgl_fp8rl.receiver.kv.scales import KVScales

logger = logging.getLogger(__name__)

SCALES = {
    "engine": "kept while they suit the first prompts of a version",
    "trainer": "sent with each update",
    "unit": "1",
}
"""Where KV scales come from where weights bring none, by the option ``kv_scheme``."""


def log_start(model: Any) -> None:
    """Log what is quantized, by which kernels it computes, and how KV scales are got: once for all
    ranks, after ``startup.prepare``."""
    if compat.get_tp_group().rank_in_group != 0:
        return
    layers = list_layers(model)
    reasons = Counter(layer.reason for layer in layers if layer.format == UNQUANTIZED.name)
    stock = "PyTorch's on a CPU" if cpu_platform.is_active() else "SGLang's own"
    weights = weights_of(model)
    kv = None if weights is None else weights.kv
    logger.info(
        "fp8rl: %s; bf16: %s; kernels: %s; KV cache: %s",
        counted(layer.format for layer in layers),
        "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common()) or "none",
        getattr(model, "fp8rl_kernels", stock),
        _kv_cache(kv),
    )
    if padded := [layer for layer in layers if layer.unpadded]:
        logger.info(
            "fp8rl: %d layers are padded to whole blocks, by %.1f MB of zeros: %s",
            len(padded),
            sum(layer.padding_bytes for layer in padded) / 1e6,
            "; ".join(f"{count} x {what}" for what, count in Counter(map(_padded, padded)).items()),
        )


def _padded(layer: LayerFormat) -> str:
    stored, held = ("x".join(map(str, shape)) for shape in (layer.shape, layer.unpadded or ()))
    return f"{layer.name.rpartition('.')[2]} {held} in {stored}"


def _kv_cache(kv: QuantizedKV | None) -> str:
    if kv is None:
        return "not quantized"
    return f"FP8, its scales {SCALES[kv.scheme]}" if isinstance(kv, KVScales) else "INT8"
