"""At start: the kernels that we call by SGLang's private functions, held against the reference.

That a function exists says nothing about what its arguments mean; a version that scales, sorts or
sums otherwise ends the start here instead of serving wrong tokens. Inputs are tokens with outliers,
weights those that are loaded.

Shape suffixes: M tokens, K inputs, H hidden, T experts per token.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.gemm.experts import experts
from sgl_fp8rl.engine.gemm.grouped_experts import least_tokens
from sgl_fp8rl.engine.layers.moe import experts_reference
from sgl_fp8rl.engine.startup.expert_kernels import largest_of_experts, one_of_each_shape
from sgl_fp8rl.ops.reference import BLOCK, fp8_linear

logger = logging.getLogger(__name__)

TOKENS = 16
"""Rows of a decode step, for which DeepGEMM has its kernel by then."""
ROWS = 2048
"""Of a weight that the reference has in FP32 at a time: a start takes little memory beside it."""
MAX_LINEAR_ERROR, MAX_EXPERTS_ERROR = 0.02, 0.05
"""Relative, of L2 norms. Healthy: at most 0.0017 of Qwen3-8B on an H200, SGLang 0.5.23, and for
experts 0.0032 (tests/gpu/test_experts.py), as rounding turns some codes between their GEMMs into
the next ones."""


def check_linears(layers: Iterable[Any]) -> None:
    """Check a linear of each shape, on the kernel that it got.

    Raises:
        RuntimeError: its products are wrong.
    """
    for layer in {layer.weight.shape: layer for layer in layers}.values():
        method = layer.quant_method
        padding, power_of_two = method.padding, method.format.power_of_two_scales
        weight, scales = layer.weight, layer.weight_scale_inv
        x_MK = tokens(TOKENS, weight.shape[1] if padding is None else padding.cols.length)
        x_MK = x_MK.to(weight.device)
        wide = x_MK if padding is None else padding.cols.pad(x_MK)
        parts = zip(weight.split(ROWS), scales.split(ROWS // BLOCK), strict=True)
        made = [fp8_linear(wide, *part, power_of_two=power_of_two) for part in parts]
        want = torch.cat(made, dim=-1)
        _check(
            partial(method.apply, layer, x_MK),
            want if padding is None else padding.rows.cut(want),
            MAX_LINEAR_ERROR,
            f"FP8 GEMM of a weight {list(weight.shape)}",
            "--fp8-gemm-backend triton",
        )


def check_experts(model: Any) -> None:
    """Check the experts of each shape, in a decode step and, where that is another kernel, in a
    prefill.

    Raises:
        RuntimeError: their sums are wrong.
    """
    for layer, T in one_of_each_shape(model):
        weight, config = layer.w13_weight, layer.moe_runner_config
        least = least_tokens(len(weight), T)
        is_grouped = layer.quant_method.is_compiled and least <= largest_of_experts()
        for M in (TOKENS, least) if is_grouped else (TOKENS,):
            x_MH = tokens(M, weight.shape[2]).to(weight.device)
            ids_MT = (torch.arange(M * T, device=weight.device).view(M, T) % len(weight)).int()
            weights_MT = torch.rand(M, T, generator=_random()).to(weight.device)
            want = experts_reference(
                *(layer, x_MH, weights_MT, ids_MT, config.routed_scaling_factor or 1.0),
                power_of_two=layer.quant_method.format.power_of_two_scales,
            )
            _check(
                partial(experts, layer, x_MH.clone(), weights_MT, ids_MT),
                want,
                MAX_EXPERTS_ERROR,
                f"FP8 experts {list(weight.shape)}, {T} for each of {M} tokens,",
                "--moe-runner-backend deep_gemm",
            )


def tokens(M: int, K: int) -> torch.Tensor:
    """BF16 ``[M, K]`` with a mean; groups of 128 differ in size, and a few channels stand out."""
    random = _random()
    gain = torch.exp2(2 * torch.randn(M, -(-K // 128), generator=random))
    x_MK = torch.randn(M, K, generator=random) + 0.3
    x_MK[:, ::97] *= 20
    return (x_MK * gain.repeat_interleave(128, 1)[:, :K]).bfloat16()


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _check(
    compute: Callable[[], torch.Tensor], want: torch.Tensor, bound: float, what: str, instead: str
) -> None:
    want = want.float()
    try:
        difference, size = float((compute().float() - want).norm()), float(want.norm())
    except (AttributeError, TypeError) as error:
        wrong = f"takes other arguments ({error})"
    else:
        if difference <= bound * size:
            logger.info("%s: off by %.2g of %.3g", what, difference, size)
            return
        wrong = f"is off by {difference:.2g} of {size:.3g} (at most {bound:.0%})"
    raise RuntimeError(
        f"the {what} of SGLang {compat.sglang_version()} {wrong}; start with {instead}, or install "
        f"SGLang {' or '.join(compat.TESTED_VERSIONS)}"
    )
