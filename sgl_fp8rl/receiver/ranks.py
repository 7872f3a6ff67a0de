"""An action tried on each rank of an engine, and values that its ranks exchange."""

import logging
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.values import attempt
from sgl_fp8rl.receiver.routes.routes import RouteError, RouteTable

logger = logging.getLogger(__name__)

T = TypeVar("T")
Gather = Callable[[Any], list[Any]]
"""Takes this rank's value and returns those of all, in rank order; every rank calls it."""
ROOM = 4096
"""Bytes of a pickled value that ranks exchange in one collective; longer ones take two."""


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


def gather_results(action: Callable[[], T], what: str, gather: Gather) -> list[T]:
    """What ``action`` returns on every rank, in rank order.

    Raises:
        ManifestError: on all ranks, where it failed on one: none waits for what does not come.
    """
    ranks = gather(attempted(action, what))
    for _, error in ranks:
        if error is not None:
            raise ManifestError(error)
    return [result for result, _ in ranks]


def gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The value of every rank of a group, in rank order.

    Half as many collectives as ``all_gather_object``, which sends sizes first: each is a round trip
    over sockets, and updates wait for several.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return [value]
    pickled = pickle.dumps(value)
    length = len(pickled).to_bytes(8, "little")
    sent = _all_gather(length + pickled[:ROOM], ROOM + 8, group)
    lengths = [int.from_bytes(each[:8], "little") for each in sent]
    starts = [each[8:] for each in sent]
    rests = [b""] * ranks
    if (longest := max(lengths)) > ROOM:
        rests = _all_gather(pickled[ROOM:], longest - ROOM, group)
    return [
        pickle.loads((start + rest)[:length])
        for start, rest, length in zip(starts, rests, lengths, strict=True)
    ]


def _all_gather(mine: bytes, size: int, group: dist.ProcessGroup) -> list[bytes]:
    """Bytes of every rank, each filled up to ``size``."""
    sent = torch.frombuffer(bytearray(mine.ljust(size, b"\0")), dtype=torch.uint8)
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, sent, group=group)
    return [each.numpy().tobytes() for each in received]


def sources(table: RouteTable | None, gather: Gather) -> dict[str, Any]:
    """How the ranks keep HF tensors, merged: with expert parallelism each has other experts."""
    ranks = [names for names in gather(table.names if table else None) if names is not None]
    if not ranks:
        return {"fp32": None, "formats": {}}
    formats: dict[str, set[str]] = {}
    for rank in ranks:
        for name, tensors in rank["formats"].items():
            formats.setdefault(name, set()).update(tensors)
    return {
        "fp32": sorted({name for rank in ranks for name in rank["fp32"]}),
        "formats": {name: sorted(tensors) for name, tensors in formats.items()},
    }
