"""Make layers of a transformers model compute like the engine's quantized layers.

The arithmetic is that of the engine's reference implementation: weights quantized in 128x128
blocks, activations per token and 128 channels; GEMMs in FP32, results in the model's dtype. A GPU
engine sums in another order and may differ by an ulp of a scale.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sgl_fp8rl.ops.reference import BLOCK, Weight, fp8_experts, fp8_linear
from sgl_fp8rl.tools.precision.groups import Group
from trainer_bridge.fp8.fp8_layers import check_experts

Forward = Callable[..., torch.Tensor]


@contextmanager
def fp8(groups: Iterable[Group]) -> Iterator[None]:
    """Compute these groups in their formats in this context, without changing their parameters.
    Codes live as long as a forward of their layer: those of all may not fit beside the model.

    Raises:
        ValueError: in a forward, a weight or an activation is NaN or Inf; or the layout of experts
            is unknown.
    """
    changed: list[nn.Module] = []
    try:
        for group in groups:
            for module in group.modules:
                is_linear = isinstance(module, nn.Linear)
                forward = _linear(module, group) if is_linear else _experts(module, group)
                module.forward = forward  # over the class's own
                changed.append(module)
        yield
    finally:
        for module in changed:
            del module.forward


def _linear(module: Any, group: Group) -> Forward:
    linear = _product(group)

    def forward(x_MK: torch.Tensor) -> torch.Tensor:
        return linear(x_MK, *_quantized(module.weight, group), module.bias)

    return forward


def _experts(module: Any, group: Group) -> Forward:
    check_experts(module, group.name)
    linear = _product(group)

    def forward(
        x_MH: torch.Tensor, topk_ids_MT: torch.Tensor, topk_weights_MT: torch.Tensor
    ) -> torch.Tensor:
        gate_up_E2IH, down_EHI = module.gate_up_proj.detach(), module.down_proj.detach()
        # gate and up begin with a block each, as in the engine
        rest = -down_EHI.shape[-1] % BLOCK
        if rest:
            halves = F.pad(gate_up_E2IH.unflatten(1, (2, -1)), (0, 0, 0, rest))
            gate_up_E2IH, down_EHI = halves.flatten(1, 2), F.pad(down_EHI, (0, rest))
        w13, w2 = _quantized(gate_up_E2IH, group), _quantized(down_EHI, group)
        out_MH = fp8_experts(x_MH, w13, w2, topk_weights_MT, topk_ids_MT, module.act_fn, linear)
        return out_MH.to(x_MH.dtype)

    return forward


def _product(group: Group) -> Forward:
    return partial(fp8_linear, power_of_two=group.format.power_of_two_scales)


def _quantized(weight: torch.Tensor, group: Group) -> Weight:
    codes, scales = group.format.encode(weight.detach()).values()
    return codes, scales
