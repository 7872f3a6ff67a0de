"""A CPU as a platform of verl, which has none; for ``VERL_USE_EXTERNAL_MODULES``.

verl imports this file in each of its processes. What it changes: where tensors are, gloo, and how
verl's replica imports SGLang, which then takes our CPU platform. The trainer, its FSDP2 engine, the
agent loop and the server are verl's own.
"""

import sys
from functools import partial
from typing import Any

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.utils import distributed
from verl.workers.rollout.replica import RolloutReplicaRegistry


@PlatformRegistry.register("cpu")
class PlatformCPU(PlatformCUDA):  # type: ignore[misc]
    """Ranks take Ray's resource ``GPU``, of which ``ray.init`` says that there are some."""

    device_name = "cpu"
    device_module = torch.cpu

    def current_device(self) -> Any:
        return "cpu"

    def set_allocator_settings(self, settings: str) -> None:
        pass


def _sglang_replica() -> Any:
    """Without ``SGLANG_USE_CPU_ENGINE``, with which verl's loader imports SGLang: it asks for
    Intel's kernels in place of our platform, and then for libcuda."""
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica

    return SGLangReplica


RolloutReplicaRegistry.register("sglang", _sglang_replica)

# "cpu:gloo,DEVICE:BACKEND" is verl's default, and torch takes one backend for a device
distributed.initialize_global_process_group_ray = partial(
    distributed.initialize_global_process_group_ray, backend="gloo"
)

# what verl calls of torch.cuda, and torch.cpu lacks
for _name in ("memory_allocated", "memory_reserved"):
    setattr(torch.cpu, _name, lambda: 0)
    setattr(torch.cpu, f"max_{_name}", lambda: 0)
torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]

# verl imports AutoModelForCausalLMWithValueHead where trl is installed, and trl 1.16 has none
sys.modules["trl"] = None  # type: ignore[assignment]
