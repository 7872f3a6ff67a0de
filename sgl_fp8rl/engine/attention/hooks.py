"""Hooks on what SGLang chose for an engine: its attention backends, and the CPU platform."""

from typing import Any

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.attention import kv_attention
from sgl_fp8rl.engine.attention.backends import TRTLLM_MHA
from sgl_fp8rl.engine.attention.flashinfer_plans import wait_for_copy
from sgl_fp8rl.engine.attention.kv_decode import fused_forward, mark
from sgl_fp8rl.engine.compat.wrapping import wrap
from sgl_fp8rl.engine.cpu import cpu_kernels


def wrap_attention(prefill: str, decode: str, model: Any) -> None:
    """Wrap what serves an 8-bit KV cache in this process: the attention backends, and where our
    kernel decodes the model's own modules.
    """
    hooks = {
        f"{compat.ATTENTION_BACKENDS[backend]}.forward_{phase}": kv_attention.HOOKS[backend][phase]
        for phase, backend in (("extend", prefill), ("decode", decode))
    }
    if decode == TRTLLM_MHA:
        hooks |= dict.fromkeys(mark(model), fused_forward)
    wrap(hooks)


def wrap_plans() -> None:
    """Wrap FlashInfer's planning of decode steps, of MLA too, in this process."""
    wrap(dict.fromkeys(compat.FLASHINFER_PLANS, wait_for_copy))


def wrap_kernels() -> None:
    """Wrap what would launch a Triton kernel, in a process on the CPU platform."""
    wrap(
        {
            compat.SHARED_EXPERT_GATE: cpu_kernels.gate_shared_expert,
            compat.LOGITS_CAP: cpu_kernels.cap_logits,
            compat.TRITON_LAUNCH: cpu_kernels.refuse_launch,
        }
    )
