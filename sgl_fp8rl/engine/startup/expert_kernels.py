"""At start, once weights are loaded: tiles and kernels of a model's FP8 experts."""

import logging
from collections.abc import Iterator
from typing import Any

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.control.attached import options_of
from sgl_fp8rl.engine.gemm import expert_tiles
from sgl_fp8rl.engine.gemm.broadcast import broadcast_from_rank0
from sgl_fp8rl.engine.gemm.expert_tiles import ExpertShape
from sgl_fp8rl.engine.gemm.experts import takes_codes
from sgl_fp8rl.engine.gemm.grouped_experts import compile_grouped
from sgl_fp8rl.engine.gemm.tune_cache import Machine
from sgl_fp8rl.engine.layers.moe import FP8RLMoEMethod
from sgl_fp8rl.engine.tuning.warmup import largest_batch

logger = logging.getLogger(__name__)


def assign_tile_configs(model: Any, device: int) -> None:
    """Assign tiles to each layer of experts on a GPU, the same on all ranks."""
    layers = [x for x in _layers(model) if x.w13_weight.device.type == "cuda" and takes_codes(x)]
    if not layers:
        return
    shapes = sorted({_shape(layer) for layer in layers})
    folder = options_of(model).tune_cache
    found = broadcast_from_rank0(lambda: expert_tiles.find(shapes, Machine.here(device), folder))
    for layer in layers:
        layer.quant_method.tiles = found.get(_shape(layer))
    logger.info("%d of %d shapes of FP8 experts run measured tiles", len(found), len(shapes))


def compile_experts(model: Any) -> None:
    """Compile the grouped GEMMs of each shape of experts, for the batches that this engine runs.

    As for linears, no kernel should compile while requests wait.
    """
    every = list(_layers(model))
    if not every:
        return
    layers = [layer for layer in every if takes_codes(layer)]
    bound = max(compat.deep_gemm_warmup._BUILTIN_M_LIST)
    largest = largest_batch(compat.get_schedule(), bound)
    first: dict[Any, Any] = {}
    for layer in layers:
        first.setdefault((layer.w13_weight.shape, layer.moe_runner_config.top_k), layer)
        layer.quant_method.is_compiled = True
    for (_, top_k), layer in first.items():
        compile_grouped(layer, top_k, largest)
    logger.info(
        "experts of %d of %d layers take activations that their norms quantize",
        len(layers),
        len(every),
    )


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


def has_experts(model: Any) -> bool:
    """Whether the model has experts, in whatever format."""
    return any(isinstance(module, compat.FusedMoE) for module in model.modules())


def _shape(layer: Any) -> ExpertShape:
    return ExpertShape.of(layer.w2_weight.shape, layer.moe_runner_config.top_k)


def _layers(model: Any) -> Iterator[Any]:
    """Each of our layers of experts."""
    for module in model.modules():
        if isinstance(getattr(module, "quant_method", None), FP8RLMoEMethod):
            yield module
