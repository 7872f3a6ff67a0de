"""Our hooks in SGLang's registry: the plugin's, and those of the backends that SGLang chose."""

from collections.abc import Mapping
from typing import Any

from sgl_fp8rl import compat
from sgl_fp8rl.engine import cpu_kernels, kv_attention
from sgl_fp8rl.engine.flashinfer_plans import wait_for_copy
from sgl_fp8rl.engine.kv_call import Hook


def register(target: str, hook: Hook) -> None:
    """Put ``hook`` around SGLang's function ``target``."""
    compat.HookRegistry.register(target, hook, compat.HookType.AROUND)


def wrap_attention(prefill: str, decode: str, model: Any) -> None:
    """Wrap what serves an FP8 KV cache in this process: the attention backends, and those of the
    model's own modules that a backend names.

    Raises:
        IncompatibleSGLangError: SGLang lacks a function to wrap.
    """
    hooks: dict[str, Hook] = {}
    for phase, backend in (("extend", prefill), ("decode", decode)):
        around = kv_attention.HOOKS[backend]
        hooks[f"{compat.ATTENTION_BACKENDS[backend]}.forward_{phase}"] = getattr(around, phase)
        hooks |= around.attach(model)
    _wrap(hooks)


def wrap_plans() -> None:
    """Wrap FlashInfer's planning of decode steps, of MLA too, in this process.

    Raises:
        IncompatibleSGLangError: SGLang lacks a function.
    """
    _wrap(dict.fromkeys(compat.FLASHINFER_PLANS, wait_for_copy))


def wrap_kernels() -> None:
    """Wrap what would launch a Triton kernel, in a process on the CPU platform.

    Raises:
        IncompatibleSGLangError: SGLang lacks the function.
    """
    _wrap(
        {
            compat.SHARED_EXPERT_GATE: cpu_kernels.gate_shared_expert,
            compat.LOGITS_CAP: cpu_kernels.cap_logits,
            compat.TRITON_LAUNCH: cpu_kernels.refuse_launch,
        }
    )


def _wrap(hooks: Mapping[str, Hook]) -> None:
    for target, hook in hooks.items():
        if target not in compat.HookRegistry._patched:
            register(target, hook)
    compat.HookRegistry.apply_hooks()
    compat.check_hooks(hooks)
