"""Which ranks a call goes over, where the caller does not say."""

from typing import Literal, TypeAlias

import torch
import torch.distributed as dist

Local: TypeAlias = Literal["local"]
LOCAL: Local = "local"
"""This process alone."""


def group_of(group: dist.ProcessGroup | Local | None) -> dist.ProcessGroup | None:
    """The ranks of ``group``, by default all of the job; None where that is this process alone."""
    if group == LOCAL:
        return None
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return group


def device_of(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Where ``group``, by default the job, reduces tensors on ``device``: NCCL not on the host."""
    kinds = [pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return device if device.type in kinds else torch.device(kinds[0])


def most_of(count: int, group: dist.ProcessGroup | Local | None) -> int:
    """The largest count of all ranks, each of which must call."""
    ranks = group_of(group)
    if ranks is None:
        return count
    found = torch.tensor(count, device=device_of(ranks, torch.device("cpu")))
    dist.all_reduce(found, dist.ReduceOp.MAX, group=ranks)
    return int(found)
