"""RMS norms of a trainer that round as the engine's do: once, behind the weight.

transformers rounds before it multiplies by the weight, and again after. That changes activation
codes now and then, and is most of the mismatch that ``fp8_forward`` would leave.
"""

from functools import cache

import torch
from torch import nn

NORMS = frozenset(
    f"{family}RMSNorm" for family in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe")
)
"""Classes of transformers that compute ``weight * rounded(x / rms(x))``, for which SGLang has its
``RMSNorm``; Gemma's are others."""


class EngineNorm(nn.Module):
    """The forward of SGLang's ``RMSNorm``, for a module of ``NORMS``."""

    weight: nn.Parameter
    variance_epsilon: float
    engine_dtype: torch.dtype

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``x / rms(x) * weight`` in FP32, rounded as the engine does, in the dtype of x:
        ``[..., H]``."""
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        weight = self.weight.to(self.engine_dtype)  # as the engine holds it
        return (x * weight.float()).to(self.engine_dtype).to(hidden_states.dtype)


def convert_norms(model: nn.Module, dtype: torch.dtype) -> int:
    """Have a model's norms round once; parameters, hooks and names stay.

    Args:
        dtype: the engine's, to which weights and results are rounded.
    """
    modules = (module for module in model.modules() if type(module).__name__ in NORMS)
    norms = [module for module in modules if "forward" not in vars(module)]  # or it is patched
    for norm in norms:
        norm.__class__ = _class_of(type(norm))  # type: ignore[arg-type]
        norm.engine_dtype = dtype  # type: ignore[assignment]
    return len(norms)


@cache
def _class_of(kind: type) -> type:
    return type(f"Engine{kind.__name__}", (EngineNorm, kind), {})
