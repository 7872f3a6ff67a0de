"""A real Ray with a real fp8rl server under our replica, and two gloo ranks under our adapter.

No trainer of verl (``test_trainer`` has it): a test does with each rank what it wants. Parts are
real where they meet ours: registries, replica, server, adapters, and the generator of an FSDP2
engine's weights.
"""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutMode

from sgl_fp8rl.verl.replica import Replica
from tests.engine.harness import BUCKET_BYTES, IDLE, SMALL
from trainer_bridge.transport.ray_actor import RayEngine

RANKS = 2
START_TIMEOUT_S = 500.0
CALL_TIMEOUT_S = 300.0
GATHER_TIMEOUT_S = 150.0
"""A rank that is left waiting fails before the call does."""
PROMPT = list(range(1, 17))
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True, "ignore_eos": True}


def rollout_config(**more: Any) -> RolloutConfig:
    """One server for both ranks, and so an engine of as many: each on a core of its own."""
    engine = {
        **SMALL,
        **IDLE,
        "enable_memory_saver": False,
        "kv_cache_dtype": "fp8_e4m3",
        "fp8rl_bucket_bytes": BUCKET_BYTES,
    }
    settings = {
        "name": "sglang",
        "quantization": "fp8rl",
        "tensor_model_parallel_size": RANKS,
        "prompt_length": 64,
        "response_length": 512,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "free_cache_engine": False,
        "calculate_log_probs": True,
        "engine_kwargs": {"sglang": engine},
    }
    return RolloutConfig(**settings | more)


def model_config(checkpoint: Path) -> HFModelConfig:
    attention = {"attn_implementation": "sdpa"}
    return HFModelConfig(path=str(checkpoint), load_tokenizer=False, override_config=attention)


def sharded(checkpoint: Path, adapter: Path | None = None) -> Any:
    """A trainer's model of this checkpoint, with an adapter of PEFT's, wrapped by verl."""
    from peft import PeftModel
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoModelForCausalLM
    from verl.utils.fsdp_utils import apply_fsdp2

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    apply_fsdp2(model, {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}, {})
    return model


def handed_over(model: Any, device: str = "cpu", offloaded: bool = False) -> Any:
    """What verl's own FSDP engine hands over: a generator of whole tensors, gathered one by one.
    Adapters are merged, as ``lora.merge`` asks for.

    Args:
        device: stands for the GPU.
        offloaded: whether parameters are on the CPU between verl's turns.
    """
    from verl.utils import fsdp_utils
    from verl.workers.engine.fsdp import transformer_impl

    # verl knows no CPU platform
    fsdp_utils.get_device_id = transformer_impl.get_device_id = lambda: device
    transformer_impl.log_gpu_memory_usage = lambda *_, **__: None
    engine = object.__new__(transformer_impl.FSDPEngine)
    engine.module = model
    engine.model_config = SimpleNamespace(lora={"merge": True}, hf_config=model.config)
    engine._uses_fsdp2_cpu_offload_policy = engine._qat_enabled = False
    engine._is_offload_param = offloaded
    weights, adapter = engine.get_per_tensor_param(base_sync_done=True)
    assert adapter is None
    return weights


class Rank:
    """A trainer rank: an asynchronous actor, as verl's workers are, with an adapter."""

    def __init__(
        self, rank: int, store: str, rollout: RolloutConfig, checkpoint: Path, visible: str
    ) -> None:
        torch.set_num_threads(1)
        names = {"RANK": rank, "RAY_LOCAL_WORLD_SIZE": RANKS, "CUDA_VISIBLE_DEVICES": visible}
        os.environ.update({name: str(value) for name, value in names.items()})
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=RANKS,
            timeout=timedelta(seconds=GATHER_TIMEOUT_S),
        )
        adapter = get_rollout_class("sglang")
        self._adapter = adapter(rollout, model_config(checkpoint), device_mesh=None)
        self.read = 0

    async def update(
        self, checkpoint: Path, step: int | None, broken: str | None = None, **more: Any
    ) -> int:
        """Update to a checkpoint, with a NaN in one tensor; how many tensors were read."""
        self.read = 0
        weights = self._counted(handed_over(sharded(checkpoint)), broken)
        await self._adapter.update_weights(weights, global_steps=step, **more)
        return self.read

    def count(self) -> int:
        """How many tensors were read last."""
        return self.read

    def _counted(self, weights: Any, broken: str | None) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self.read += 1
            yield name, torch.full_like(tensor, torch.nan) if name == broken else tensor


class Cluster:
    """What a test works with."""

    def __init__(self, replica: Any, ranks: list[Any]) -> None:
        self.replica, self.ranks = replica, ranks
        self.server = replica.server_handle
        self.engine = RayEngine(self.server)

    def each_rank(self, method: str, *args: Any, **keywords: Any) -> list[Any]:
        """Call a method on every rank at once; an exception in place of a result it raised."""
        sent = [getattr(rank, method).remote(*args, **keywords) for rank in self.ranks]
        results: list[Any] = []
        for reference in sent:
            try:
                results.append(ray.get(reference, timeout=CALL_TIMEOUT_S))
            except ray.exceptions.RayTaskError as error:
                results.append(error.cause)
        return results

    def send(self, tokens: int, **sampling: Any) -> Any:
        """Start a request, as verl's client does."""
        asked = {**SAMPLING, "max_tokens": tokens, **sampling}
        rid = os.urandom(8).hex()
        return self.server.generate.remote(
            request_id=rid, prompt_ids=PROMPT, sampling_params=asked, image_data=None
        )

    def generate(self, tokens: int = 8, **sampling: Any) -> Any:
        return ray.get(self.send(tokens, **sampling), timeout=CALL_TIMEOUT_S)


@contextmanager
def local_ray(**resources: int) -> Iterator[None]:
    """A Ray of its own; at the end all that it started is gone: actors, and a server's engine."""
    ray.init(
        address="local",
        object_store_memory=200 << 20,
        include_dashboard=False,
        runtime_env={"env_vars": {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(RANKS)))}},
        **resources,
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def cluster(checkpoint: Path, folder: Path) -> Iterator[Cluster]:
    """Ray, the server, which starts without weights, and the ranks; at the end all are gone."""
    with local_ray(num_cpus=2):
        config = rollout_config()
        # not from verl's registry, which lets SGLang look for Intel's kernels and then for libcuda
        replica = Replica(replica_rank=0, config=config, model_config=model_config(checkpoint))
        rank = ray.remote(Rank)
        store = str(folder / "store")
        ranks = [
            rank.options(num_cpus=0, max_concurrency=8).remote(n, store, config, checkpoint, "")
            for n in range(RANKS)
        ]
        replica.rollout_mode, replica.workers = RolloutMode.HYBRID, ranks
        asyncio.run(asyncio.wait_for(replica.launch_servers(), START_TIMEOUT_S))
        yield Cluster(replica, ranks)
