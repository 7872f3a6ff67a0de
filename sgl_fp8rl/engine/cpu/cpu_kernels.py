"""Triton kernels on the CPU platform, which cannot launch one: torch forms of two, and a sentence
for every other.

Shape suffixes: M tokens, H hidden, V vocabulary.
"""

from typing import Any

import torch
from torch import nn

from sgl_fp8rl.engine import compat


def gate_shared_expert(
    _: Any,
    hidden_MH: torch.Tensor,
    gate_weight_H: torch.Tensor,
    shared_MH: torch.Tensor,
    out_MH: torch.Tensor,
) -> None:
    """AROUND ``fused_gate_sigmoid_mul_add``: add the gated shared expert to ``out_MH``.

    Computes in FP32 and rounds once, as the kernel does.
    """
    gate_M = (hidden_MH.float() @ gate_weight_H.float()).sigmoid()
    out_MH.copy_(out_MH.float() + gate_M[:, None] * shared_MH.float())


def cap_logits(_: Any, logits_MV: torch.Tensor, cap: float) -> torch.Tensor:
    """AROUND ``softcap_inplace_logits``: write ``cap * tanh(logits / cap)`` into ``logits_MV``."""
    return logits_MV.copy_((logits_MV.float() / cap).tanh() * cap)


def refuse_launch(_: Any, kernel: Any, grid: Any) -> Any:
    """AROUND ``KernelInterface.__getitem__``, which each launch of a Triton kernel goes through."""
    while hasattr(kernel, "fn"):  # of tuners and the compiler, around a Python function
        kernel = kernel.fn
    raise RuntimeError(
        f"this model needs the Triton kernel {kernel.__name__}, which the CPU platform has no form "
        f"of; run it on a GPU"
    )


def check_attention(model: nn.Module) -> None:
    """Check that torch_native attention computes what the layers of ``model`` ask for."""
    for layer in model.modules():
        if isinstance(layer, compat.RadixAttention) and layer.logit_cap:
            raise ValueError(
                f"attention layer {layer.layer_id} caps its logits at {layer.logit_cap}, which the "
                f"CPU platform's torch_native attention does not; run this model on a GPU"
            )
