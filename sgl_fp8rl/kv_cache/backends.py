"""Which attention backends an FP8 KV cache gets, and why; those that cannot scale are refused.

Chosen before SGLang resolves its arguments, because its own default on Hopper (FA3) casts q to FP8
unscaled. What the user gave is kept, or refused with a sentence; it is never replaced.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch

logger = logging.getLogger(__name__)

FP8_KV = "fp8_e4m3"
UNQUANTIZED = (None, "auto", "bf16", "bfloat16")
XQA = "trtllm_mha"
"""SGLang's name of the backend that decodes with FlashInfer's XQA kernel on Hopper."""
XQA_PAGE_SIZE = 64
XQA_PAGE_SIZES = (16, 32, 64, 128)
HOPPER = 9

ARGUMENTS = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "page_size",
)
"""Those of SGLang that are chosen here where the user set none."""

Capability = tuple[int, int] | None
"""Compute capability, such as (9, 0); None is a CPU."""


REASONS = {
    "torch_native": "what the CPU platform runs; scales are folded into q and out",
    "flashinfer": "its FA2 kernels attend to codes with scales folded into q and out",
    XQA: "XQA decodes FP8 KV fastest on Hopper, and takes scales as device tensors",
}
"""Why each backend is one that an FP8 KV cache is given."""


def choose(given: Mapping[str, Any], capability: Capability) -> dict[str, str | int]:
    """The arguments that an FP8 KV cache needs beside those that were given.

    Args:
        given: ``ARGUMENTS`` as the user set them; absent or None where unset.

    Raises:
        ValueError: what was given cannot honour KV scales on this device.
    """
    both = given.get("attention_backend")
    prefill = given.get("prefill_attention_backend") or both
    decode = given.get("decode_attention_backend") or both
    check(prefill, decode, capability)
    if capability is None:
        return {} if prefill and decode else {"attention_backend": "torch_native"}
    settings: dict[str, str | int] = {}
    if both is None:
        # SGLang asks for this one in places where both others are set
        settings["attention_backend"] = "flashinfer"
    if prefill is None:
        settings["prefill_attention_backend"] = "flashinfer"
    if decode is None:
        decode = XQA if capability[0] == HOPPER else "flashinfer"
        settings["decode_attention_backend"] = decode
    page_size = given.get("page_size")
    if decode == XQA and page_size is None:
        settings["page_size"] = XQA_PAGE_SIZE
    elif decode == XQA and page_size not in XQA_PAGE_SIZES:
        raise ValueError(
            f"--page-size {page_size} is none that {XQA} reads; drop it or use one of "
            f"{', '.join(map(str, XQA_PAGE_SIZES))}"
        )
    return settings


def check(prefill: str | None, decode: str | None, capability: Capability) -> None:
    """Hold that these backends honour KV scales; None is one that is still to be chosen.

    Raises:
        ValueError: one does not.
    """
    scaled = scaled_backends(capability)
    for phase, backend in (("prefill", prefill), ("decode", decode)):
        if backend is not None and backend not in scaled[phase]:
            raise ValueError(
                f"attention backend {backend} cannot honour the scales of an FP8 KV cache in "
                f"{phase} here; drop it or use {' or '.join(scaled[phase])}"
            )


def scaled_backends(capability: Capability) -> dict[str, tuple[str, ...]]:
    """The backends that honour KV scales on a device, for each phase."""
    if capability is None:
        return {"prefill": ("torch_native",), "decode": ("torch_native",)}
    xqa = (XQA,) if capability[0] == HOPPER else ()
    return {"prefill": ("flashinfer",), "decode": (*xqa, "flashinfer")}


def check_dtype(kv_cache_dtype: str | None) -> bool:
    """Whether the KV cache is FP8.

    Raises:
        ValueError: a format that has no scales of ours.
    """
    if kv_cache_dtype == FP8_KV:
        return True
    if kv_cache_dtype not in UNQUANTIZED:
        raise ValueError(
            f"quantization fp8rl cannot scale a KV cache of dtype {kv_cache_dtype}; use "
            f"--kv-cache-dtype {FP8_KV}, or bf16"
        )
    return False


def check_resolved(server_args: Any) -> None:
    """Hold SGLang's arguments, from whatever source they came; 0.5.23 resolves them later.

    Raises:
        ValueError: a backend that cannot honour scales, a graph that would hide the prefill which
            measures them, or a cache that is spread over ranks.
    """
    both = server_args.attention_backend
    prefill = server_args.prefill_attention_backend or both
    check(prefill, server_args.decode_attention_backend or both, capability())
    graphs = getattr(server_args.cuda_graph_config, "prefill", None)
    asked = (server_args.cuda_graph_backend_prefill, getattr(graphs, "backend", None))
    # breakable and piecewise graphs run attention between their pieces; a full one replays it
    if "full" in asked:
        raise ValueError(
            "--cuda-graph-backend-prefill full hides the prefills on which KV scales are measured; "
            "use breakable"
        )
    for field in ("dcp_size", "attn_cp_size"):
        if getattr(server_args, field, 1) not in (None, 1):
            raise ValueError(
                f"an FP8 KV cache cannot be shared out by --{field.replace('_', '-')} "
                f"{getattr(server_args, field)} yet; start it without"
            )


def capability() -> Capability:
    """The compute capability of this machine's GPUs, or None where SGLang will run on a CPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def log(prefill: str, decode: str, page_size: int) -> None:
    """Say which backends serve the FP8 KV cache, and why."""
    for phase, backend in (("prefill", prefill), ("decode", decode)):
        logger.info("FP8 KV cache: %s by %s: %s", phase, backend, REASONS[backend])
    if decode == XQA:
        logger.info("FP8 KV cache: pages of %d tokens: XQA reads whole pages", page_size)
