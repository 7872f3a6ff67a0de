"""The ways of what is not read in place: chunks of memory that engines read, or are sent."""

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from sgl_fp8rl.formats import by_tensor
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.protocol.cuda_memory import CudaMemoryError, gpu_uuid
from sgl_fp8rl.protocol.image import Steps
from sgl_fp8rl.protocol.manifest import MOST_SLOTS, SLOTS
from trainer_bridge.transfer.transfer_plan import TransferPlan
from trainer_bridge.transport.bucket import Bucket
from trainer_bridge.transport.rank_client import Content, EngineRanks
from trainer_bridge.ways.changes import Base, Changes, as_sent

logger = logging.getLogger(__name__)

LEAST_CHUNK_BYTES = 32 << 20
"""Smaller chunks are more round trips than work."""


class Holder(Protocol):
    """What is kept of one engine."""

    base: Base | None
    """What it is sent changes of."""


class Carrier:
    """A way of chunks to the engines of one layout."""

    is_far = False
    """Whether engines are sent what is in the bucket."""

    def __init__(self, layout: dict[str, Any], device: torch.device | None) -> None:
        self._layout, self.device = layout, device

    @staticmethod
    def fits(layout: dict[str, Any], device: torch.device | None) -> bool:
        """Whether these engines can be reached so.

        Args:
            device: the trainer's GPU, or None where it has none that the engines can read.
        """
        raise NotImplementedError

    @property
    def slots(self) -> int:
        """Of the bucket, of which one is filled while the engine writes another."""
        return SLOTS

    def senders(self, ranks: int) -> int:
        """How many of so many ranks send together: each has slots of its own."""
        return 1

    @property
    def quantized(self) -> dict[str, WeightFormat]:
        """HF tensors that are quantized on the way, since the engines keep them so."""
        return by_tensor(self._layout["formats"])

    def bucket(self, nbytes: int) -> Bucket:
        """A new one.

        Raises:
            EngineError: there is not enough memory.
            UnreachableMemoryError: this system does not share the GPU's.
        """
        return Bucket(nbytes, self.device, not self.is_far)

    def begin(self, plan: TransferPlan, engines: Sequence[tuple[Holder, EngineRanks]]) -> None:
        """Get ready for an update of these engines."""

    def content(self, chunk: int, data: Content, held: list[str | None]) -> Steps[Content | None]:
        """A chunk that is filled, as it is sent; None where engines read it in the bucket.

        Args:
            held: the bases that engines hold.
        """
        return None
        yield

    @property
    def bases(self) -> tuple[str, str]:
        """Those that changes are of, and that they make; empty where there are none."""
        return "", ""

    def committed(self) -> None:
        """Engines have what was sent."""

    def close(self) -> None:
        """The update is over, however it ended."""


class GPUBucket(Carrier):
    """Device memory of the trainer, which ranks on this host open; they read codes."""

    @staticmethod
    def fits(layout: dict[str, Any], device: torch.device | None) -> bool:
        return device is not None

    @property
    def slots(self) -> int:
        """1 of their size together where one GPU would fill and write, which takes turns between
        processes."""
        assert self.device is not None
        if self.device.type != "cuda":
            return SLOTS
        try:
            return 1 if {gpu_uuid(self.device.index)} == set(self._layout["gpus"]) else SLOTS
        except CudaMemoryError:
            return SLOTS  # whoever shares this GPU's memory will say what is wrong with it

    def content(self, chunk: int, data: Content, held: list[str | None]) -> Steps[Content | None]:
        torch.cuda.current_stream(self.device).synchronize()  # the slot is filled
        return None
        yield


class HostBucket(Carrier):
    """Host memory: for engines on a CPU, for trainers without a GPU, and for those whose GPU memory
    the engine cannot open."""

    @staticmethod
    def fits(layout: dict[str, Any], device: torch.device | None) -> bool:
        return True

    @property
    def quantized(self) -> dict[str, WeightFormat]:
        """Of weights that would have gone through the trainer's GPU; engines quantize others."""
        return super().quantized if self._layout["through_host"] else {}


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

    @staticmethod
    def fits(layout: dict[str, Any], device: torch.device | None) -> bool:
        return bool(layout["is_remote"])

    def senders(self, ranks: int) -> int:
        most: int = self._layout["bucket_bytes"] // (SLOTS * LEAST_CHUNK_BYTES)
        return max(1, min(ranks, most, MOST_SLOTS // SLOTS))

    def begin(self, plan: TransferPlan, engines: Sequence[tuple[Holder, EngineRanks]]) -> None:
        """Send only what changed to engines that hold the last update."""
        self._changes, self._keeping = None, []
        self._fingerprint, bases, held = plan.manifest.fingerprint, [], []
        for holder, ranks in engines:
            if ranks.image is None or not _can_change(plan, ranks.image_bytes):
                holder.base = None
                continue
            held.append(ranks.image)
            self._keeping.append(holder)
            if holder.base is not None and holder.base.fingerprint == self._fingerprint:
                bases.append(holder.base)
        if not self._keeping:
            return
        found = (each.image for each in bases if each.image.name and each.image.name in held)
        self._changes = Changes(next(found, None))
        for _, ranks in engines:
            ranks.next_image = self._changes.name
        if not self._changes.before:
            for base in bases:
                base.image.empty()  # its memory goes before that of the next one comes
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
                "it on the trainer's side, or start the engines without --fp8rl-image-bytes"
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
