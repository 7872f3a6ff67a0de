"""Select attention backends for an 8-bit KV cache, and refuse those that cannot apply its scales.

This happens before SGLang resolves its arguments, whose default on Hopper is FA3 for prefill and
decode. The user's own choice is kept or refused with an error, never replaced.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sgl_fp8rl.protocol.kv_schema import E4M3, INT8

logger = logging.getLogger(__name__)

FP8_KV = "fp8_e4m3"
"""SGLang's name of a dtype of one byte; INT8 codes lie in the same memory."""
UNQUANTIZED = (None, "auto", "bf16", "bfloat16")
TRTLLM_MHA = "trtllm_mha"
"""SGLang's name of the backend whose page tables our decode kernel reads on Hopper."""
FA3 = "fa3"
PAGE_SIZE = 64
PAGE_SIZES = (16, 32, 64, 128)
HOPPER = 9

ARGUMENTS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "page_size",
)
"""SGLang's arguments that are set here if the user did not."""

Capability = tuple[int, int] | None
"""Compute capability, such as (9, 0); None for a CPU."""


@dataclass(frozen=True)
class AttentionBackend:
    """How one of SGLang's attention backends serves an 8-bit KV cache."""

    reason: str
    """Why it is selected."""
    formats: tuple[str, ...] = (E4M3,)
    prefill: str | None = None
    """The devices where it applies KV scales in prefill: ``cpu``, ``gpu`` or ``hopper``."""
    decode: str | None = None


BACKENDS = {
    "torch_native": AttentionBackend(
        "the backend of the CPU platform", (E4M3, INT8), prefill="cpu", decode="cpu"
    ),
    TRTLLM_MHA: AttentionBackend(
        "our kernel multiplies in 16 bits over its pages, at the memory's speed",
        (E4M3, INT8),
        decode="hopper",
    ),
    FA3: AttentionBackend(
        "it attends in 16 bits to the values of pages, side by side in a workspace",
        (E4M3, INT8),
        prefill="hopper",
    ),
    "flashinfer": AttentionBackend(
        "its FA2 kernels attend to codes with scales folded into q and out",
        prefill="gpu",
        decode="gpu",
    ),
}
"""By SGLang's name; the first that serves a phase is selected. ``compat.ATTENTION_BACKENDS`` has
their classes and ``engine/attention/kv_attention.py`` their hooks."""


def choose(
    given: Mapping[str, Any], capability: Capability, kv_format: str = E4M3
) -> dict[str, str | int]:
    """The arguments that an 8-bit KV cache needs in addition to the user's.

    Args:
        given: ``ARGUMENTS`` as the user set them; missing or None if unset.

    Raises:
        ValueError: the user's choice cannot apply KV scales on this device.
    """
    both = given.get("attention_backend")
    prefill = given.get("prefill_attention_backend") or both
    decode = given.get("decode_attention_backend") or both
    check(prefill, decode, capability, kv_format)
    if capability is None:
        return {} if prefill and decode else {"attention_backend": "torch_native"}
    fastest = {phase: names[0] for phase, names in scaled_backends(capability, kv_format).items()}
    settings: dict[str, str | int] = {}
    if prefill is None:
        prefill = settings["prefill_attention_backend"] = fastest["prefill"]
    if decode is None:
        decode = settings["decode_attention_backend"] = fastest["decode"]
    if both is None:
        # SGLang reads this one in some places even if both others are set
        settings["attention_backend"] = prefill
    page_size = given.get("page_size")
    if decode == TRTLLM_MHA and page_size is None:
        settings["page_size"] = PAGE_SIZE
    else:
        check_pages(decode, page_size)
    return settings


def check_pages(decode: str, page_size: int | None) -> None:
    """Check that a backend decodes pages of this size."""
    if decode == TRTLLM_MHA and page_size not in PAGE_SIZES:
        raise ValueError(
            f"--page-size {page_size} is not supported by {TRTLLM_MHA}; drop it or use one of "
            f"{', '.join(map(str, PAGE_SIZES))}"
        )


def check(
    prefill: str | None, decode: str | None, capability: Capability, kv_format: str = E4M3
) -> None:
    """Check that these backends apply KV scales; None is not selected yet."""
    scaled = scaled_backends(capability, kv_format)
    if not all(scaled.values()):
        raise ValueError(
            f"no attention backend serves a KV cache in {kv_format} on this device yet; use "
            f"--fp8rl-kv-cache {E4M3}"
        )
    for phase, backend in (("prefill", prefill), ("decode", decode)):
        if backend is not None and backend not in scaled[phase]:
            raise ValueError(
                f"attention backend {backend} cannot apply the scales of a KV cache in {kv_format} "
                f"in {phase} here; drop it or use {' or '.join(scaled[phase])}"
            )


def scaled_backends(capability: Capability, kv_format: str = E4M3) -> dict[str, tuple[str, ...]]:
    """The backends that apply the scales of a format on a device, for each phase."""
    rows = {name: row for name, row in BACKENDS.items() if kv_format in row.formats}
    is_hopper = capability is not None and capability[0] == HOPPER
    here = ("cpu",) if capability is None else ("gpu", "hopper") if is_hopper else ("gpu",)
    return {
        "prefill": tuple(name for name, row in rows.items() if row.prefill in here),
        "decode": tuple(name for name, row in rows.items() if row.decode in here),
    }


def dtype_of(kv_format: str | None, kv_cache_dtype: str | None) -> str | None:
    """SGLang's dtype of the KV cache, by the option ``kv_cache`` and what the user gave SGLang.

    Raises:
        ValueError: they contradict each other.
    """
    if kv_format is None:
        return kv_cache_dtype
    if kv_cache_dtype not in (None, "auto", FP8_KV):
        raise ValueError(
            f"--kv-cache-dtype {kv_cache_dtype} contradicts --fp8rl-kv-cache {kv_format}; drop one"
        )
    return FP8_KV


def check_dtype(kv_cache_dtype: str | None) -> bool:
    """Whether the KV cache is FP8.

    Raises:
        ValueError: the format is not supported.
    """
    if kv_cache_dtype == FP8_KV:
        return True
    if kv_cache_dtype not in UNQUANTIZED:
        raise ValueError(
            f"quantization fp8rl cannot scale a KV cache of dtype {kv_cache_dtype}; use "
            f"--kv-cache-dtype {FP8_KV}, or bf16"
        )
    return False


def check_resolved(settings: Any, kv_format: str = E4M3) -> None:
    """Check SGLang's arguments as it resolved them (``compat.settings``)."""
    both = settings.attention_backend
    prefill = settings.prefill_attention_backend or both
    decode = settings.decode_attention_backend or both
    check(prefill, decode, capability(), kv_format)
    check_pages(decode, settings.page_size)
    is_asked = settings.enable_deterministic_inference or settings.rl_on_policy_target
    if is_asked and decode == TRTLLM_MHA:  # SGLang looks at attention_backend alone
        raise ValueError(
            f"{TRTLLM_MHA} decodes an FP8 KV cache with sums that depend on the batch where many "
            f"sequences share a prefix; add --decode-attention-backend flashinfer"
        )
    # breakable and piecewise graphs run attention between their pieces; a full graph replays it
    if settings.cuda_graph_config.prefill.backend == "full":
        raise ValueError(
            "--cuda-graph-backend-prefill full hides the prefills on which KV scales are measured; "
            "use breakable"
        )
    for field in ("dcp_size", "attn_cp_size"):
        if getattr(settings, field, 1) not in (None, 1):
            raise ValueError(
                f"an FP8 KV cache cannot be split by --{field.replace('_', '-')} "
                f"{getattr(settings, field)} yet; start it without"
            )


def capability() -> Capability:
    """The compute capability of this machine's GPUs, or None where SGLang will run on a CPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def log(prefill: str, decode: str, page_size: int) -> None:
    """Log which backends serve the 8-bit KV cache, and why."""
    for phase, backend in (("prefill", prefill), ("decode", decode)):
        logger.info("8-bit KV cache: %s by %s: %s", phase, backend, BACKENDS[backend].reason)
    if decode == TRTLLM_MHA:
        logger.info("8-bit KV cache: pages of %d tokens", page_size)
