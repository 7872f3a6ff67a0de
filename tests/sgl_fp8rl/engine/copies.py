"""A model that SGLang itself would not update: something keeps copies of weights."""

import inspect

import pytest
from torch import nn

from sgl_fp8rl.engine import compat

WORDS = "Online weight updates are not supported"
"""How SGLang begins to say so."""


def keep_copies(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``model`` keep them, as modules of SGLang declare it, in the way that it looks for."""
    if inspect.signature(compat.derived_weight_cache_error).parameters:
        next(model.children())._derived_weight_cache_error = f"{WORDS} with a cached split."  # type: ignore[assignment]
        return
    from sglang.kernels.ops.attention.dsv4 import gemm  # 0.5.17 knows of one cache, of all models

    monkeypatch.setattr(gemm, "_hpc_gemm_enabled", True)
