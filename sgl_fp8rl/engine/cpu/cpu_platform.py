"""SGLang on any x86 CPU with stock wheels: a platform plugin, not a mock.

The real scheduler, the real model code and real sockets run; attention is SGLang's torch_native
backend and FP8 arithmetic is ``ops.reference``. It activates only without an alternative: no CUDA
device, no other platform plugin, SGLANG_USE_CPU_ENGINE unset.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

import torch

from sgl_fp8rl.engine import compat

ENTRY_POINT = "fp8rl_cpu"


def activate() -> str | None:
    """Entry point of the group ``sglang.srt.platforms``: our class path, or None to decline."""
    devices = (getattr(torch, name, None) for name in ("cuda", "xpu", "npu", "mps", "musa"))
    if any(device is not None and device.is_available() for device in devices):
        return None
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    others = {ep.name for ep in entry_points(group="sglang.srt.platforms")} - {ENTRY_POINT}
    if others and os.environ.get("SGLANG_PLATFORM") != ENTRY_POINT:
        return None
    return f"{__name__}.CpuPlatform"


def is_active() -> bool:
    """Whether SGLang runs on our CPU platform in this process."""
    return isinstance(compat.current_platform, CpuPlatform)


class CpuPlatform(compat.CpuDeviceMixin, compat.SRTPlatform):  # type: ignore[misc]
    """A plain CPU as an out-of-tree SGLang platform."""

    _enum = compat.PlatformEnum.OOT
    _makes_pools = False

    def is_cpu(self) -> bool:
        return not self._makes_pools

    @contextmanager
    def making_pools(self) -> Iterator[None]:
        """Set while SGLang makes its KV pools: ours are plain ones, as on a GPU."""
        self._makes_pools = True
        try:
            yield
        finally:
            self._makes_pools = False

    def get_device(self, device_id: int | None = 0) -> Any:
        return "cpu"  # SGLang's argument handling splits it as a string

    def apply_server_args_defaults(self, server_args: Any) -> None:
        server_args.disable_cuda_graph = True
        for name, value in {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "llguidance",
        }.items():
            if getattr(server_args, name) is None:
                setattr(server_args, name, value)

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        return compat.MHATokenToKVPool if kind == "mha" else None

    def get_mha_kv_pool_cls(self) -> type:
        return compat.MHATokenToKVPool  # type: ignore[no-any-return]

    def get_mla_kv_pool_cls(self) -> Any:
        return latent_pool

    def get_paged_allocator_cls(self) -> Any:
        return token_allocator

    def get_compile_backend(self, mode: str | None = None) -> str:
        # Inductor compiles C++ at each start. On AVX2, the code that torch 2.14 generated for
        # SGLang 0.5.23's embedding under TP looked up tokens outside the shard.
        return "eager"

    def is_pin_memory_available(self, device: torch.device | None = None) -> bool:
        return False

    def get_dispatch_key_name(self) -> str:
        return "native"


def token_allocator(size: int, page_size: int, *args: Any, **kwargs: Any) -> Any:
    """SGLang's allocator of single tokens, with the signature of its paged one.

    Raises:
        ValueError: pages of more than one token.
    """
    if page_size != 1:
        raise ValueError(f"the CPU platform has pages of one token; drop --page-size {page_size}")
    return compat.TokenToKVPoolAllocator(size, *args, **kwargs)


def latent_pool(*args: Any, index_head_dim: int | None = None, **kwargs: Any) -> Any:
    """SGLang's pool of MLA, to which 0.5.17 passes an argument that it does not take.

    Raises:
        ValueError: the model has sparse attention (DSA).
    """
    if index_head_dim is not None:
        raise ValueError("the CPU platform has no sparse attention (DSA); run this model on a GPU")
    return compat.MLATokenToKVPool(*args, **kwargs)


def _attend_to_latents(*_: Any) -> Any:
    """MLA in the form that torch_native computes. By default SGLang prefills with K and V beside
    the KV cache, but torch_native attends to what is in the cache, which is their latents."""
    return compat.AttnForwardMethod.MLA


def with_plain_pools(original: Any, configurator: Any, **kwargs: Any) -> Any:
    """AROUND ``KVCacheConfigurator.configure``: torch_native attends to all caches. From 0.5.23 on
    SGLang serves a CPU's FP8 KV cache with kernels that need AMX, and refuses it elsewhere."""
    if not is_active():
        return original(configurator, **kwargs)
    compat.AttentionBackendRegistry.register("torch_native", _attend_to_latents)
    with compat.current_platform.making_pools():
        return original(configurator, **kwargs)


def without_pynccl(original: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``init_model_parallel_group``: SGLang requests NCCL on a device that it does not know,
    even if the backend is gloo."""
    backend = kwargs["backend"] if "backend" in kwargs else args[2]
    if backend == "gloo" and is_active():
        kwargs["use_pynccl"] = False
    return original(*args, **kwargs)
