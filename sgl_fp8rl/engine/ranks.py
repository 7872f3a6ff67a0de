"""An action tried on each rank of an engine, and values that its ranks exchange."""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from sgl_fp8rl.protocol.attempt import attempt
from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.weight_update.routes import RouteError, RouteTable

logger = logging.getLogger(__name__)

T = TypeVar("T")


def attempted(action: Callable[[], T], what: str) -> tuple[T | None, str | None]:
    """The result of an action on this rank, or the error that the other ranks are given.

    Args:
        what: names the action in the log, where the error is not a refusal.
    """
    result, fault = attempt(action)
    if fault is None:
        return result, None
    if not isinstance(fault, ManifestError | RouteError):
        logger.error("%s failed on this rank", what, exc_info=fault)
    return None, str(fault) or type(fault).__name__


def gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The value of every rank of the tensor-parallel group, in rank order."""
    if dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def sources(table: RouteTable | None, group: dist.ProcessGroup) -> dict[str, Any]:
    """How the ranks keep HF tensors, merged: with expert parallelism each has other experts."""
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
