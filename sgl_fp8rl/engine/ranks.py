"""What the ranks of one engine say together."""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from sgl_fp8rl.protocol.attempt import attempt
from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.weight_update.routes import RouteError, RouteTable

logger = logging.getLogger(__name__)

T = TypeVar("T")


def planned(action: Callable[[], T], what: str) -> tuple[T | None, str | None]:
    """What a rank plans, or why it cannot, for the other ranks to hear.

    Args:
        what: names it in the log, where the failure is not a refusal.
    """
    result, fault = attempt(action)
    if fault is None:
        return result, None
    if not isinstance(fault, ManifestError | RouteError):
        logger.error("%s could not be planned", what, exc_info=fault)
    return None, str(fault) or type(fault).__name__


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
