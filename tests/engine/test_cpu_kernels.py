"""Kernels that the CPU platform computes in torch: engines in FP32 against transformers' models."""

from pathlib import Path

import numpy as np
import pytest

from tests.engine import hf_oracle, models
from tests.engine.harness import EngineProcess
from tests.engine.test_families import score

pytestmark = pytest.mark.engine

BOUND = 1e-4
"""Of |logprob of the engine - logprob of transformers|, the largest of 99 tokens. Both compute in
FP32; measured 1.2e-5 (qwen2_moe) and 2.8e-6 (gemma2)."""
SEEN = 100 * BOUND
"""What a model without the kernel's work differs by, at least."""


def no_gate(tensors: models.Tensors, _: list[str]) -> None:
    """Let each shared expert count half, whatever the token."""
    for name in tensors:
        if name.endswith("shared_expert_gate.weight"):
            tensors[name].zero_()


def largest(a: list[float], b: list[float]) -> float:
    return float(np.abs(np.subtract(a, b)).max())


@pytest.mark.parametrize("family", ["qwen2_moe", "gemma2"])
def test_an_engine_in_fp32_is_transformers(family: str, tmp_path: Path) -> None:
    """With the gate of shared experts, and with a cap of final logits; not without them."""
    path = models.make_checkpoint(family, tmp_path / "model")
    with EngineProcess(tmp_path / "log", path, quantization=None, dtype="float32") as engine:
        tokens, logprobs = score(engine)
    oracle = hf_oracle.prompt_logprobs(path, tokens, fp8=False)
    assert largest(logprobs, oracle) < BOUND
    fault = no_gate
    if family == "gemma2":
        fault = None
        path = models.make_checkpoint(family, tmp_path / "no cap", final_logit_softcapping=None)
    control = hf_oracle.prompt_logprobs(path, tokens, fp8=False, fault=fault)
    assert largest(control, oracle) > SEEN


def test_capped_attention_is_refused_at_start(tmp_path: Path) -> None:
    path = models.make_checkpoint("gemma2", tmp_path / "model", attn_logit_softcapping=50.0)
    why = r"layer 0 caps its logits at 50\.0"
    with pytest.raises(RuntimeError, match=why), EngineProcess(tmp_path / "log", path):
        pass
