"""Torch forms of Triton kernels against FP64, and what SGLang computes on a plain CPU."""

import os
import pkgutil
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from sgl_fp8rl.engine import compat

TOKENS, HIDDEN, VOCAB, CAP = 7, 384, 500, 3.0
DTYPES = (torch.float32, torch.bfloat16)
BOUNDS = {torch.float32: 4e-6, torch.bfloat16: 2**-8}
"""Relative to 1 + |x|: one rounding to BF16, or in FP32 a sum over H; measured 3e-7 and 2**-9."""


@pytest.fixture
def kernels() -> Any:

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


PROGRAM = """
import torch
from sglang.srt.layers.vocab_parallel_embedding import get_masked_input_and_mask
ids = torch.tensor([0, 255, 256, 300, 511])
rows, outside = get_masked_input_and_mask(ids, 256, 512, 0, 512, 512)
print(rows.tolist(), outside.tolist())
"""


@pytest.mark.sglang
def test_compiled_functions_need_no_compiler(tmp_path: Path) -> None:
    """Of two ranks, the second looks up its half of the vocabulary."""
    environment = {
        "CXX": str(tmp_path / "no compiler"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "nothing compiled before"),
    }
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    expected = "[0, 0, 0, 44, 255] [True, True, False, False, False]"
    assert found.stdout.splitlines()[-1] == expected
