"""Gated experts of quantized weights in plain torch, for CPU engines."""

from collections.abc import Callable

import torch

from sgl_fp8rl.ops.reference import fp8_linear

Weight = tuple[torch.Tensor, torch.Tensor]
"""Codes ``[E, N, K]`` and scales ``[E, N/128, K/128]``, or ``[E, N, 1]`` for ``channel_linear``."""


def fp8_experts(
    x_MH: torch.Tensor,
    w13: Weight,
    w2: Weight,
    topk_weights_MT: torch.Tensor,
    topk_ids_MT: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor],
    linear: Callable[..., torch.Tensor] = fp8_linear,
) -> torch.Tensor:
    """Run gated experts one by one.

    Suffixes: M tokens, H hidden, T experts per token. ``w13`` has the gate rows, then the up rows.

    Returns:
        FP32 ``[M, H]``: the weighted sum of the experts' results, which have the dtype of ``x_MH``.
    """
    out_MH = torch.zeros_like(x_MH, dtype=torch.float32)
    for expert in topk_ids_MT.unique().tolist():
        if expert < 0:
            continue  # the expert lives on another rank
        tokens, slots = (topk_ids_MT == expert).nonzero(as_tuple=True)
        gate_up = linear(x_MH[tokens], *(part[expert] for part in w13))
        gate, up = gate_up.chunk(2, dim=-1)
        down = linear(activation(gate) * up, *(part[expert] for part in w2))
        weight = topk_weights_MT[tokens, slots].float().unsqueeze(-1)
        out_MH.index_add_(0, tokens, down.float() * weight)
    return out_MH
