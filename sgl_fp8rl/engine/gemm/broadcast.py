"""One choice of kernels for all ranks of an engine: different kernels would sum differently."""

from collections.abc import Callable
from typing import TypeVar, cast

import torch

from sgl_fp8rl.engine import compat

T = TypeVar("T")


def broadcast_from_rank0(find: Callable[[], T]) -> T:
    """Return the result of ``find`` on rank 0, on every rank; a collective call."""
    group = compat.get_tp_group()
    found = [find() if group.rank_in_group == 0 else None]
    if group.world_size > 1:
        torch.distributed.broadcast_object_list(found, src=group.ranks[0], group=group.cpu_group)
    return cast(T, found[0])
