"""At start, once weights are loaded: compile GEMM kernels, and give FP8 linears codes to multiply.

The KV cache does not exist yet: SGLang sizes it after this, by the free memory.
"""

from collections.abc import Iterator
from typing import Any

import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.attention.hooks import wrap_kernels
from sgl_fp8rl.engine.control.attached import weights_of
from sgl_fp8rl.engine.control.host import forget_embeddings
from sgl_fp8rl.engine.cpu import cpu_kernels, cpu_platform
from sgl_fp8rl.engine.gemm import linear as gemm
from sgl_fp8rl.engine.layers import fusion
from sgl_fp8rl.engine.layers.linear import FP8RLLinearMethod
from sgl_fp8rl.engine.startup import warmup
from sgl_fp8rl.engine.startup.expert_kernels import compile_experts, keep_inputs
from sgl_fp8rl.engine.startup.kernel_checks import check_experts, check_linears


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
        compat.deep_gemm_warmup._BUILTIN_M_LIST = rows  # for SGLang's own pass
    if layers and (why := _why_stock(runner)) is not None:
        runner.model.fp8rl_kernels = f"SGLang's own, since {why}"
    elif layers:
        for layer in layers:
            layer.quant_method.kernel = gemm.deep_gemm
        runner.model.fp8rl_kernels = "DeepGEMM"
        check_linears(layers)
        compile_experts(runner.model)
        fusion.fuse(runner.model)
    if not cpu_platform.is_active():
        check_experts(runner.model)


def gemm_layers(model: Any) -> Iterator[Any]:
    """Each of our linear layers that SGLang runs with DeepGEMM."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if not isinstance(method, FP8RLLinearMethod):
            continue
        linear = method.w8a8_block_fp8_linear
        is_deep_gemm = getattr(linear, "func", linear) is compat.deep_gemm_linear
        if is_deep_gemm and gemm.fits_deep_gemm(*layer.weight.shape):
            yield layer


def _why_stock(runner: Any) -> str | None:
    backend = compat.get_fp8_gemm_runner_backend()
    if not backend.is_auto():
        return f"--fp8-gemm-backend {backend.value} is set"
    if torch.cuda.get_device_capability(runner.gpu_id)[0] != 9:
        return "the GPU is not a Hopper, for which producers quantize"
    if runner.model_config.dtype != torch.bfloat16:
        return f"the model computes in {runner.model_config.dtype}"
    deterministic = compat.get_exec().deterministic
    if deterministic.enable_deterministic_inference or deterministic.rl_on_policy_target:
        return "deterministic inference is on, which takes SGLang's own operators"
    return None
