"""What frameworks send a stock engine from a trainer sharded over several GPUs: buckets of whole
tensors, which every rank gathers."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate

from benchmarks import update
from benchmarks.engines import stock_push, weights


def parameters(module: nn.Module) -> list[tuple[str, DTensor]]:
    """Each with its name, as ``fully_shard`` left it."""
    return [(n, p) for n, p in module.named_parameters() if isinstance(p, DTensor)]


def meet() -> None:
    """Wait for all ranks."""
    dist.all_reduce(torch.zeros(1))


Send = Callable[[weights.Named, bool, str], None]
"""``send(bucket, last, update)``, on every rank."""


def over_ipc(engine: Any) -> Send:
    """Each rank's bucket to the rank on its GPU of an engine, which the first rank has."""

    def send(bucket: weights.Named, last: bool, what: str) -> None:
        payloads: list[Any] | None = None if engine is None else [None] * dist.get_world_size()
        dist.gather_object(stock_push.payload(bucket), payloads)
        if payloads is not None:
            stock_push.send_payloads(engine, payloads, last, what)

    return send


def stock_update(engine: Any, module: nn.Module, send: Send, bucket_bytes: int) -> update.Update:
    """Gather a bucket at a time, and send it to an engine, which the first rank has."""

    def step(version: int) -> None:
        with stock_push.session(engine):
            for bucket, last in gathered_buckets(module, bucket_bytes):
                send(bucket, last, f"update {version}")
                meet()  # this rank's bucket is read until the engine has answered

    return step


def gathered_buckets(module: nn.Module, bucket_bytes: int) -> Iterator[tuple[weights.Named, bool]]:
    """Whole tensors under their HF names, a bucket at a time, and whether it is the last.

    Each gather is waited for, also on a rank that sends nothing: torch keeps those that are not.
    """
    pending: list[tuple[str, torch.Tensor]] = []
    remaining = parameters(module)
    while remaining:
        name, parameter = remaining.pop(0)
        whole = [Replicate()] * parameter.device_mesh.ndim
        gathered = parameter.redistribute(placements=whole, async_op=True).to_local()
        # the gathers of a bucket are queued, and waited for together; not those of gloo, in whose
        # threads they corrupted the heap in 2 of 18 runs on a busy machine (torch 2.11)
        pending.append((name, gathered if parameter.is_cuda else _waited_for(gathered)))
        if not remaining or stock_push.sum_bytes(pending) >= bucket_bytes:
            complete = [(name, _waited_for(tensor)) for name, tensor in pending]
            bucket = [
                (hf_name, cut(tensor))
                for name, tensor in complete
                for hf_name, cut in weights.split(module, name, tensor)
            ]
            pending = []
            yield bucket, not remaining


def _waited_for(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
