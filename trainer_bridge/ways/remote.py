"""The way to engines on other hosts: chunks follow their messages, or exact changes of chunks.

Changes are what an update changes of the one before, which these engines hold: a trainer keeps the
chunks of the last update, its base, and engines have it in what they store.
"""

import logging
import secrets
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sgl_fp8rl.formats import by_tensor
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.protocol.manifest import MOST_SLOTS, SLOTS
from sgl_fp8rl.protocol.snapshot import Change, Snapshot, Steps
from trainer_bridge.transfer.transfer_plan import TransferPlan
from trainer_bridge.transport.rank_client import Content, EngineRanks
from trainer_bridge.ways.carriers import Carrier

logger = logging.getLogger(__name__)

LEAST_CHUNK_BYTES = 32 << 20
"""Smaller chunks are more round trips than work."""
BASES = 2
"""Bases of a rank that does not lead; each is its part of a model."""


@dataclass
class Base:
    """The last update that an engine on another host committed. It outlasts a failure: the engine
    says what it holds."""

    fingerprint: str
    """Of its manifest."""
    snapshot: Snapshot
    has_failed: bool = False
    """Whether the last update of an engine that holds it failed: after a second one the next is
    whole."""


class Holder(Protocol):
    """What is kept of one engine."""

    base: Base | None
    """What it is sent changes of."""


class Changes:
    """The changes of one update.

    Args:
        base: what they are of; None where chunks travel whole.
    """

    def __init__(self, base: Snapshot | None, name: str | None = None) -> None:
        self.before = "" if base is None else base.name
        """The name of the base; empty where chunks travel whole."""
        self.name = name or secrets.token_hex(16)
        self._snapshot = base or Snapshot("", {})
        self._changes: dict[int, Change] = {}
        self._device = torch.device("cpu")

    def of(self, chunk: int, content: torch.Tensor) -> Steps[Change]:
        """What becomes of a chunk.

        Args:
            content: uint8, where weights are quantized: the base lies there too. It is copied where
                it is needed later than after two steps.
        """
        self._device = content.device
        change = self._changes[chunk] = yield from self._snapshot.changing(chunk, content)
        return change

    def commit(self) -> Snapshot:
        """What engines hold from now on."""
        return self._snapshot.advance(self._changes, self.name, self._device)


def as_sent(
    changes: Changes | None, chunk: int, content: Content, held: Collection[str | None]
) -> Steps[Content]:
    """A chunk as engines on other hosts are sent it: with its change, if they keep bases."""
    data, offset = content.data, content.offset
    if changes is None:
        return Content(offset, data.cpu())
    before = changes.before
    is_whole_for_some = before and any(name != before for name in held)
    whole = data.cpu() if is_whole_for_some else data
    change = yield from changes.of(chunk, data)
    return Content(offset, whole if change.is_delta else change.payload, before, change)


class Bases:
    """What a rank that does not lead sent in updates before, by the names of the bases."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Snapshot] = OrderedDict()

    def changes(self, before: str, name: str) -> Changes | None:
        """The changes of an update to a base, which make another one; None where engines keep
        none, and so does this rank from now on."""
        if not name:
            self.forget()
            return None
        return Changes(self._kept.get(before) or Snapshot(before, {}), name)

    def keep(self, changes: Changes) -> None:
        """The update has committed."""
        self._kept.pop(changes.before, None)
        self._kept[changes.name] = changes.commit()
        while len(self._kept) > BASES:
            self._kept.popitem(last=False)

    def forget(self) -> None:
        """Engines keep none any more."""
        self._kept.clear()


class TCP(Carrier):
    """Chunks follow their messages to engines on other hosts, or NIXL writes them there before
    where a relay exposes its memory (``RelayClient``). Several ranks may send, each every so
    many-th chunk. Engines that keep what they were sent get exact changes of it."""

    is_far = True

    def __init__(self, layout: dict[str, Any], device: torch.device | None) -> None:
        super().__init__(layout, device)
        self._changes: Changes | None = None
        """None where no engine keeps what it is sent."""
        self._keeping: list[Holder] = []
        self._fingerprint = ""

    @property
    def slots(self) -> int:
        return SLOTS

    @property
    def quantized(self) -> dict[str, WeightFormat]:
        return by_tensor(self._layout["formats"])

    def senders(self, ranks: int) -> int:
        most: int = self._layout["bucket_bytes"] // (SLOTS * LEAST_CHUNK_BYTES)
        return max(1, min(ranks, most, MOST_SLOTS // SLOTS))

    def begin(self, plan: TransferPlan, engines: Sequence[tuple[Holder, EngineRanks]]) -> None:
        """Send only what changed to engines that hold the last update."""
        self._changes, self._keeping = None, []
        self._fingerprint, bases, held = plan.manifest.fingerprint, [], []
        for holder, ranks in engines:
            if ranks.snapshot is None or not _can_change(plan, ranks.snapshot_bytes):
                holder.base = None
                continue
            held.append(ranks.snapshot)
            self._keeping.append(holder)
            if holder.base is not None and holder.base.fingerprint == self._fingerprint:
                bases.append(holder.base)
        if not self._keeping:
            return
        found = (
            each.snapshot for each in bases if each.snapshot.name and each.snapshot.name in held
        )
        self._changes = Changes(next(found, None))
        for _, ranks in engines:
            ranks.next_snapshot = self._changes.name
        if not self._changes.before:
            for base in bases:
                base.snapshot.empty()  # its memory goes before that of the next one comes
            for holder in self._keeping:
                holder.base = None

    def content(self, chunk: int, data: Content, held: list[str | None]) -> Steps[Content | None]:
        return (yield from as_sent(self._changes, chunk, data, held))

    @property
    def bases(self) -> tuple[str, str]:
        return ("", "") if self._changes is None else (self._changes.before, self._changes.name)

    def committed(self) -> None:
        """Send the next update as changes of this one, where engines have kept it."""
        if self._changes is None:
            return
        changes, self._changes, base = self._changes, None, None
        try:
            base = Base(self._fingerprint, changes.commit())
        except (RuntimeError, MemoryError):  # the engines have committed all the same
            logger.exception(
                "what was sent is not kept, so the next update is sent whole; leave memory for "
                "it on the trainer's side, or start the engines without --fp8rl-snapshot-bytes"
            )
        for holder in self._keeping:
            holder.base = base

    def close(self) -> None:
        """An update that has not committed has failed."""
        if self._changes is not None:
            for holder in self._keeping:
                if holder.base is not None and holder.base.has_failed:
                    holder.base = None
            for base in [holder.base for holder in self._keeping if holder.base is not None]:
                base.has_failed = True  # several engines may hold it
        self._changes, self._keeping = None, []


def _can_change(plan: TransferPlan, most: int) -> bool:
    """Whether changes of this update may come; a stream's chunks are not known before."""
    chunks = range(len(plan.chunks))
    return not plan.streamed and sum(plan.extent(i)[1] for i in chunks) <= most
