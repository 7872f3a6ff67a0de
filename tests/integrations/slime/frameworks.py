"""What of slime and miles the updater meets, with their names, signatures and order of calls.

Read in slime 0.3.1 (THUDM/slime, commit 624b824) and miles (radixark/miles, commit 31f1ca9):
``backends/megatron_utils/{initialize,actor}.py`` and ``update_weight/hf_weight_iterator_*.py``.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from trainer_bridge.adapters import slime as ours

Pairs = Iterator[tuple[str, torch.Tensor]]
BUFFER_BYTES = 200_000


class Stock:
    """The class that the framework would have used."""


class HfWeightIterator:
    """Walked by all ranks in lockstep, in chunks of a limited size; ``model`` makes the pairs."""

    def __init__(
        self, args: Namespace, model: Sequence[Any], model_name: str, quantization_config: Any
    ) -> None:
        assert model_name == "qwen3config" and quantization_config is None
        self.args, self.model = args, model

    @staticmethod
    def create(args: Namespace, model: Sequence[Any], **keywords: Any) -> "HfWeightIterator":
        return HfWeightIterator(args, model, **keywords)

    def get_hf_weight_chunks(
        self, megatron_local_weights: Any
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        chunk: list[tuple[str, torch.Tensor]] = []
        for name, tensor in self.model[0](megatron_local_weights):
            size = sum(each.nbytes for _, each in chunk)
            if chunk and size + tensor.nbytes > self.args.update_weight_buffer_size:
                yield chunk
                chunk = []
            chunk.append((name, tensor))
        yield chunk


def options(framework: str, addresses: list[str], **changed: Any) -> Namespace:
    """The options that the updater reads, with the frameworks' defaults."""
    own = {
        "slime": {"update_weight_mode": "full", "update_weight_transport": "nccl"},
        "miles": {"update_weight_transfer_mode": "broadcast", "pause_generation_mode": "retract"},
    }
    given = {
        "colocate": False,
        "hf_checkpoint": "/the/checkpoint",
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_external_engine_addrs": addresses,
        "update_weight_buffer_size": BUFFER_BYTES,
    }
    return Namespace(**(given | own[framework] | changed))


def modules(framework: str) -> dict[str, ModuleType]:
    """The modules of a train actor, for ``sys.modules``."""
    backend = f"{framework}.backends.megatron_utils"
    base = f"{backend}.update_weight.hf_weight_iterator_base"
    contents: dict[str, dict[str, Any]] = {
        f"{backend}.actor": {"UpdateWeightFromDistributed": Stock},
        base: {"HfWeightIteratorBase": HfWeightIterator},
        f"{framework}.utils.distributed_utils": {"get_gloo_group": lambda: dist.group.WORLD},
    }
    made = {}
    for name, values in contents.items():
        made[name] = ModuleType(name)
        vars(made[name]).update(values)
    return made


def start(
    framework: str,
    args: Namespace,
    weights: Callable[[], Mapping[str, torch.Tensor]],
    gather: Callable[[Any], Pairs],
    **changed: Any,
) -> Any:
    """The updater, as ``MegatronTrainRayActor.init`` makes it."""
    ours.init(args)
    actor: Any = sys.modules[f"{framework}.backends.megatron_utils.actor"]
    given: dict[str, Any] = {"model_name": "qwen3config", "quantization_config": None}
    if framework == "miles":
        given["is_lora"] = False
    updater = actor.UpdateWeightFromDistributed(
        args, [gather], weights_getter=weights, **(given | changed)
    )
    if framework == "slime":
        updater.weight_version = getattr(args, "update_weight_start_version", 0)
    return updater


def update(framework: str, updater: Any, engines: int = 1) -> None:
    """``MegatronTrainRayActor.update_weights``; slime connects where engines are new."""
    given: dict[str, Any] = {
        "engine_gpu_counts": [1] * engines,
        "engine_gpu_offsets": list(range(engines)),
    }
    if framework == "slime":
        given["engine_parallel_configs"] = [{"tp_size": 1}] * engines
        is_new = updater.weight_version == 0
    else:
        is_new = not updater.is_rollout_engines_fresh()
    if is_new:
        updater.connect_rollout_engines([object()] * engines, object(), **given)
    dist.barrier()
    updater.update_weights()


def from_first_rank(tensors: Mapping[str, torch.Tensor]) -> Pairs:
    """Pairs that all ranks receive together: one that leaves the walk hangs the others."""
    for name, tensor in tensors.items():
        whole = tensor.clone() if dist.get_rank() == 0 else torch.empty_like(tensor)
        dist.broadcast(whole, src=0)
        yield name, whole
