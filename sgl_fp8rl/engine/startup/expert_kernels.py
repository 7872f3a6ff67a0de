"""At start, once weights are loaded: the kernels of a model's FP8 experts."""

import logging
from collections.abc import Iterator
from typing import Any

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.gemm.experts import takes_codes
from sgl_fp8rl.engine.gemm.grouped_experts import compile_grouped
from sgl_fp8rl.engine.layers.moe import FP8RLMoEMethod
from sgl_fp8rl.engine.startup.warmup import largest_batch

logger = logging.getLogger(__name__)


def compile_experts(model: Any) -> None:
    """Compile the grouped GEMMs of each shape of experts, for the batches that this engine runs.

    As for linears, no kernel should compile while requests wait.
    """
    every = list(_layers(model))
    if not every:
        return
    layers = [layer for layer in every if takes_codes(layer)]
    for layer in layers:
        layer.quant_method.is_compiled = True
    for layer, top_k in one_of_each_shape(model):
        compile_grouped(layer, top_k, largest_of_experts())
    logger.info(
        "experts of %d of %d layers take activations that their norms quantize",
        len(layers),
        len(every),
    )


def one_of_each_shape(model: Any) -> list[tuple[Any, int]]:
    """A layer of experts that run here, and how many a token has, for each of their shapes."""
    first: dict[Any, Any] = {}
    for layer in _layers(model):
        if takes_codes(layer):
            top_k = layer.moe_runner_config.top_k
            first.setdefault((layer.w13_weight.shape, top_k), (layer, top_k))
    return list(first.values())


def largest_of_experts() -> int:
    """The most tokens of a batch."""
    bound = max(compat.deep_gemm_warmup._BUILTIN_M_LIST)
    return largest_batch(compat.get_schedule(), bound)


def keep_inputs(model: Any) -> None:
    """Have experts leave their input as it is where shared experts may still read it.

    In CUDA graphs of DeepSeek's models those run on a stream of their own, beside routed experts,
    which would write their result into the input of both.
    """
    for module in model.modules():
        shared, stream = (getattr(module, name, None) for name in ("shared_experts", "alt_stream"))
        config = getattr(getattr(module, "experts", None), "moe_runner_config", None)
        if shared is not None and stream is not None and config is not None:
            config.inplace = False


def _layers(model: Any) -> Iterator[Any]:
    """Each of our layers of experts."""
    for module in model.modules():
        if isinstance(getattr(module, "quant_method", None), FP8RLMoEMethod):
            yield module
