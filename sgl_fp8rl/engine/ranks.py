"""What the ranks of one engine say together."""

from typing import Any

import torch.distributed as dist

from sgl_fp8rl.weight_update.routes import RouteTable


def gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The value of every rank of the tensor-parallel group, in rank order."""
    if dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def sources(table: RouteTable | None, group: dist.ProcessGroup) -> dict[str, Any]:
    """How the ranks together keep HF tensors: with expert parallelism each has other experts."""
    ranks = [names for names in gather(table.names if table else None, group) if names is not None]
    if not ranks:
        return {"fallback": [], "fp32": None, "formats": {}}
    formats: dict[str, set[str]] = {}
    for rank in ranks:
        for name, tensors in rank["formats"].items():
            formats.setdefault(name, set()).update(tensors)
    return {
        "fallback": sorted({name for rank in ranks for name in rank["fallback"]}),
        "fp32": sorted({name for rank in ranks for name in rank["fp32"]}),
        "formats": {name: sorted(tensors) for name, tensors in formats.items()},
    }
