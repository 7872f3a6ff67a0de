"""What the receiver of updates asks of the engine around it, on each of the engine's ranks."""

import pickle
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from sgl_fp8rl.protocol.policy import Policy

ROOM = 4096
"""Bytes of a pickled value that ranks exchange in one collective; longer ones take two."""


class EngineHost(Protocol):
    """One rank of an engine. ``update_steps.py`` drives it, at the same step on every rank."""

    @property
    def rank(self) -> int:
        """Of this process, among those that ``gather`` reaches."""

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order; all ranks call it."""

    def tell(self, reply: dict[str, Any]) -> None:
        """Send the trainer's side a reply before the message is answered."""

    def make_idle(self) -> bool:
        """Empty the prefix cache; False while a request is there, and nothing changed."""

    def holds_requests(self, in_flight: object) -> bool:
        """Whether generation is paused, which keeps requests from ending as ``in_flight`` wants."""

    def why_not_retract(self) -> str | None:
        """Why requests in flight cannot be retracted, whatever they are; None where they can."""

    def retract(self) -> bool:
        """Take requests off the batch and empty the KV cache; False where it could not be."""

    def why_not_written(self, model: nn.Module) -> str | None:
        """Why weights that are written now would not reach all that is computed with."""

    def refuse_waiting(self, message: str) -> None:
        """Answer each request that waits with an error."""

    def committed(self, policy: Policy) -> None:
        """Name the policy in the engine's own replies, and forget what the one before had made."""


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
