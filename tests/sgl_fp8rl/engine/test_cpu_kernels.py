"""Torch forms of Triton kernels against FP64, and what the CPU platform refuses."""

import pkgutil
from inspect import signature
from typing import Any

import pytest
import torch
import triton
from torch import nn

from sgl_fp8rl.engine import compat

TOKENS, HIDDEN, VOCAB, CAP = 7, 384, 500, 3.0
DTYPES = (torch.float32, torch.bfloat16)
BOUNDS = {torch.float32: 4e-6, torch.bfloat16: 2**-8}
"""Relative to 1 + |x|: one rounding to BF16, or in FP32 a sum over H; measured 3e-7 and 2**-9."""


@pytest.fixture
def kernels() -> Any:
    import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)

    from sgl_fp8rl.engine.cpu import cpu_kernels

    return cpu_kernels


def draw(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((found.double() - exact).abs() / (1 + exact.abs())).max())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gate_adds_the_shared_expert_in_place(kernels: Any, dtype: torch.dtype) -> None:
    hidden, shared, out = (draw(TOKENS, HIDDEN, seed=seed, dtype=dtype) for seed in range(3))
    weight = draw(HIDDEN, seed=3, dtype=dtype) / HIDDEN**0.5
    gate = torch.sigmoid(hidden.double() @ weight.double())[:, None]
    exact = out.double() + gate * shared.double()
    ungated = out.double() + shared.double()

    assert kernels.gate_shared_expert(None, hidden, weight, shared, out) is None
    assert error(out, exact) < BOUNDS[dtype] < error(out, ungated)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_are_capped_in_place(kernels: Any, dtype: torch.dtype) -> None:
    """Rows of a wider buffer, as SGLang cuts a padded vocabulary off."""
    buffer = draw(TOKENS, VOCAB + 12, seed=0, dtype=dtype) * 4
    before = buffer.clone()
    logits = buffer[:, :VOCAB]
    exact = CAP * torch.tanh(logits.double() / CAP)

    assert kernels.cap_logits(None, logits, CAP) is logits
    assert error(logits, exact) < BOUNDS[dtype] < error(before[:, :VOCAB], exact)
    assert torch.equal(buffer[:, VOCAB:], before[:, VOCAB:])


@pytest.mark.parametrize("tuned", [False, True])
def test_a_launch_is_refused_by_the_name_of_its_kernel(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, tuned: bool
) -> None:
    from sglang.kernels.ops.activation.softcap import softcap_inplace_logits_kernel as kernel

    launched: Any = triton.autotune([triton.Config({})], key=[])(kernel) if tuned else kernel
    owner, _, method = compat.TRITON_LAUNCH.rpartition(".")
    original = pkgutil.resolve_name(compat.TRITON_LAUNCH)
    monkeypatch.setattr(
        pkgutil.resolve_name(owner), method, lambda *args: kernels.refuse_launch(original, *args)
    )
    with pytest.raises(RuntimeError, match="Triton kernel softcap_inplace_logits_kernel"):
        launched[(1,)]


def test_what_is_wrapped_is_there(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sgl_fp8rl.engine.attention import hooks

    wrapped: dict[str, Any] = {}
    monkeypatch.setattr(hooks, "wrap", wrapped.update)
    hooks.wrap_kernels()
    assert len(wrapped) == 3
    for target, hook in wrapped.items():
        theirs, ours = (signature(f).parameters for f in (pkgutil.resolve_name(target), hook))
        assert len(theirs) + 1 == len(ours)  # and SGLang's own function


@pytest.mark.parametrize("cap", [0.0, 50.0])
def test_attention_that_caps_its_logits_is_refused(kernels: Any, cap: float) -> None:
    class Attention(compat.RadixAttention):  # type: ignore[misc]
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.layer_id, self.logit_cap = 3, cap

    model = nn.Sequential(nn.Linear(1, 1), Attention())
    if not cap:
        kernels.check_attention(model)
        return
    with pytest.raises(ValueError, match=r"attention layer 3 .* 50\.0"):
        kernels.check_attention(model)
