"""At start, once weights are loaded: compile GEMM kernels and assign them to FP8 linears.

All ranks of the engine use the table of rank 0 (``tuning.quick_tune``), so that they compute alike.
The KV cache does not exist yet: SGLang sizes it after this, by the free memory.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.attention.hooks import wrap_kernels
from sgl_fp8rl.engine.control.attached import options_of, weights_of
from sgl_fp8rl.engine.control.embedding_cache import forget_embeddings
from sgl_fp8rl.engine.cpu import cpu_kernels, cpu_platform
from sgl_fp8rl.engine.gemm import candidates
from sgl_fp8rl.engine.gemm.broadcast import broadcast_from_rank0
from sgl_fp8rl.engine.gemm.dispatch import Choices
from sgl_fp8rl.engine.gemm.table import Shape, Table
from sgl_fp8rl.engine.gemm.tune_cache import Machine
from sgl_fp8rl.engine.layers import fusion
from sgl_fp8rl.engine.layers.linear import FP8RLLinearMethod
from sgl_fp8rl.engine.startup import deep_gemm
from sgl_fp8rl.engine.startup.expert_kernels import (
    assign_tile_configs,
    compile_experts,
    has_experts,
    keep_inputs,
)
from sgl_fp8rl.engine.startup.graph_sizes import leave_out_slow_sizes
from sgl_fp8rl.engine.tuning import quick_tune, warmup
from sgl_fp8rl.ops.activation import quantize_tokens

SWAPPED_ROWS, SWAPPED_STEP = 32, 8


def prepare(original: Any, runner: Any) -> None:
    """AROUND what SGLang calls once the weights of a ``ModelRunner`` are loaded."""
    original(runner)
    if cpu_platform.is_active():
        cpu_kernels.check_attention(runner.model)
        wrap_kernels()
        # Inductor would compile C++ at the first request with a grammar
        torch.compiler.set_stance("force_eager")
    if weights_of(runner.model) is not None:
        forget_embeddings()  # an SGLang that keeps them elsewhere fails here, not after a commit
    keep_inputs(runner.model)
    layers = list(gemm_layers(runner.model))
    shapes = sorted({(n, k) for n, k in (layer.weight.shape for layer in layers)})
    if rows := warmup.warm_up(shapes, runner):
        deep_gemm.set_batch_sizes(rows)
    assign_tile_configs(runner.model, runner.gpu_id)
    if not layers:
        return
    if (why := _why_stock(runner)) is not None:
        runner.model.fp8rl_kernels = f"SGLang's own, since {why}"
        return
    chosen = broadcast_from_rank0(lambda: _here(shapes, runner))
    choices = {shape: Choices.of(chosen.get(shape, ())) for shape in shapes}
    for layer in layers:
        layer.quant_method.choices = choices[tuple(layer.weight.shape)]
    for layer in {tuple(layer.weight.shape): layer for layer in layers}.values():
        compile_choices(layer)
    runner.model.fp8rl_kernels = f"measured ones of {len(chosen)} of {len(shapes)} weight shapes"
    compile_experts(runner.model)
    if not has_experts(runner.model):  # they are most of a step, and have no table by batch
        counts = Counter((n, k) for n, k in (layer.weight.shape for layer in layers))
        leave_out_slow_sizes(runner.server_args, counts, chosen)
    fusion.fuse(runner.model)


def gemm_layers(model: Any) -> Iterator[Any]:
    """Each of our linear layers that SGLang runs with DeepGEMM."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if not isinstance(method, FP8RLLinearMethod):
            continue
        linear = method.w8a8_block_fp8_linear
        is_deep_gemm = getattr(linear, "func", linear) is compat.deep_gemm_linear
        if is_deep_gemm and candidates.fits_deep_gemm(*layer.weight.shape):
            yield layer


def compile_choices(layer: Any) -> None:
    """Run each kernel of the layer but the stock one, which SGLang compiles.

    No kernel should compile while requests wait, or inside the capture of a CUDA graph. No library
    changes its tile within ``ROW_STEP`` rows, or within 8 rows of a batch below 32, where
    FlashInfer swaps the operands.
    """
    choices = layer.quant_method.choices
    k = layer.weight.shape[1]
    below = 0
    for bound, kernel in zip(choices.bounds, choices.kernels, strict=False):
        if kernel is not choices.kernels[-1]:
            step = warmup.ROW_STEP if below >= SWAPPED_ROWS else SWAPPED_STEP
            for m in (*range(below + step, bound, step), bound):
                x_MK = torch.zeros(m, k, dtype=torch.bfloat16, device=layer.weight.device)
                kernel(*quantize_tokens(x_MK), layer.weight, layer.weight_scale_inv)
        below = bound


def _why_stock(runner: Any) -> str | None:
    backend = compat.get_fp8_gemm_runner_backend()
    if not backend.is_auto():
        return f"--fp8-gemm-backend {backend.value} is set"
    if torch.cuda.get_device_capability(runner.gpu_id)[0] != 9:
        return "the table of kernels is for Hopper"
    if runner.model_config.dtype != torch.bfloat16:
        return f"the model computes in {runner.model_config.dtype}"
    deterministic = compat.get_exec().deterministic
    if deterministic.enable_deterministic_inference or deterministic.rl_on_policy_target:
        return "deterministic inference is on, and kernels that change with M are not deterministic"
    return None


def _here(shapes: Sequence[Shape], runner: Any) -> Table:
    folder = options_of(runner.model).tune_cache
    may_measure = not compat.cuda_graph_fully_disabled()
    machine = Machine.here(runner.gpu_id)
    with deep_gemm.compiling_only_what_runs():
        return quick_tune.find(shapes, machine, folder, may_measure=may_measure)
