"""What one rank of a trainer sends to engines on other hosts: every so many-th chunk."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from sgl_fp8rl.protocol.attempt import attempt
from sgl_fp8rl.protocol.image import Image, Steps
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.ranks.rank_values import exchanged
from trainer_bridge.session.chunk_sender import ChunkSender
from trainer_bridge.transfer.filler import Filler
from trainer_bridge.transfer.image_changes import ImageChanges, sent_as
from trainer_bridge.transfer.packer import packer_on
from trainer_bridge.transfer.transfer_plan import TransferPlan
from trainer_bridge.transport.bucket import bucket_on
from trainer_bridge.transport.rank_client import Content, EngineRanks
from trainer_bridge.transport.relay_client import RelayClient

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
"""Seconds that a connection may take, while engines wait."""
KEPT = 2
"""Images of this rank's chunks that are remembered; each is its part of a model."""


@exchanged
class Relay(NamedTuple):
    """How a rank reaches an engine's relay."""

    where: dict[str, Any]
    token: str
    """Of the session."""
    timeout_s: float
    """Seconds that the engine may take over a step."""


@exchanged
class Sent(NamedTuple):
    """What a rank has sent."""

    fault: str | None
    """What is wrong with this rank's part; no engine is to blame."""
    errors: dict[str, str]
    """Why engines did not get it, by name."""
    network_bytes: int


class Images:
    """What this rank sent in updates before, by the names of their images."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Image] = OrderedDict()

    def changes(self, before: str, name: str) -> ImageChanges:
        """The changes of an update to the image ``before``, which make the image ``name``."""
        kept = self._kept.get(before)
        changes = ImageChanges([kept] if kept is not None else [Image(before, {})], {before})
        changes.name = name
        return changes

    def forget(self) -> None:
        """Engines keep none any more."""
        self._kept.clear()

    def keep(self, changes: ImageChanges) -> None:
        """The update has committed."""
        self._kept.pop(changes.before, None)
        self._kept[changes.name] = changes.commit()
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)


class Relays:
    """The engines that this rank sends to.

    Raises:
        EngineError: one cannot be reached from here.
    """

    def __init__(self, relays: Mapping[str, Relay]) -> None:
        self.errors: dict[str, str] = {}
        """Why engines did not get their part, by name."""
        self._relays: dict[str, RelayClient] = {}
        try:
            for engine, (where, token, timeout_s) in relays.items():
                self._relays[engine] = RelayClient(where, token, None, timeout_s, CONNECT_S)
        except BaseException:
            self.close()
            raise

    @property
    def ranks(self) -> list[EngineRanks]:
        return [relay for engine, relay in self._relays.items() if engine not in self.errors]

    @property
    def network_bytes(self) -> int:
        return sum(relay.network_bytes for relay in self._relays.values())

    def wait(self) -> None:
        """The rank that leads decides what becomes of engines that fail here."""
        began = time.monotonic()
        for engine in [each for each in self._relays if each not in self.errors]:
            try:
                self._relays[engine].wait(began)
            except EngineError as error:
                self.errors[engine] = str(error)
                self._relays[engine].close()

    def close(self) -> None:
        """Hang up."""
        for relay in self._relays.values():
            relay.close()


class PartSender:
    """The sending of a rank that does not lead.

    Args:
        device: this rank's GPU, where weights are quantized; None where they are in host memory.
        dtype: the engine's.
        number, senders: its place among the ranks that send, and how many there are.
        relays: of the engines, by name.
        images: those that changes are of, and that they make; empty where there are none.
        kept: what this rank sent before.

    Raises:
        EngineError: an engine cannot be reached from here.
    """

    def __init__(
        self,
        plan: TransferPlan,
        device: torch.device | None,
        dtype: torch.dtype,
        number: int,
        senders: int,
        relays: Mapping[str, Relay],
        images: tuple[str, str],
        kept: Images,
    ) -> None:
        self._plan, self._kept = plan, kept
        self._changes: ImageChanges | None = None
        if images[1]:
            self._changes = kept.changes(*images)
        else:
            kept.forget()
        # in host memory, only the pages of this rank's slots are ever touched
        self._memory = bucket_on(device, plan.manifest.bucket_bytes, is_remote=True)
        self._bucket = self._memory.content
        self._packer = packer_on(device, plan, self._bucket, dtype)
        self._packer.begin()
        self._fault: str | None = None
        self._relays = Relays(relays)
        self._chunks = ChunkSender(plan, self._relays, self._content, number, senders)
        self._filler = Filler(plan, self._chunks.send, self._chunks.await_slot, self._packer)

    def put(self, index: int, whole: torch.Tensor) -> None:
        """Put a parameter in; whatever fails is told at the end."""
        shape = self._plan.sources[index].shape
        if whole.shape != shape:
            self._fault = f"a parameter of shape {tuple(shape)} was gathered as {whole.shape}"
        self._try(self._filler.put, index, whole.to(self._bucket.device))

    def finish(self) -> Sent:
        """Send what is left, and wait until engines have read it."""
        self._try(self._filler.finish)
        self._try(self._chunks.finish)
        self._chunks.await_read()  # also behind a fault: engines go on reading
        self._try(self._packer.finish)
        return Sent(self._fault, self._relays.errors, self._relays.network_bytes)

    def committed(self) -> None:
        """The engines have what was sent."""
        if self._changes is not None:
            _, error = attempt(self._kept.keep, self._changes)
            if error is not None:  # the next update is sent whole
                logger.error("what was sent is not kept", exc_info=error)

    def close(self) -> None:
        """Hang up."""
        self._relays.close()
        self._chunks.close()

    def _try(self, action: Callable[..., object], *args: Any) -> None:
        if self._fault is not None:
            return
        _, error = attempt(action, *args)
        if error is not None:
            logger.error("a rank could not send its part", exc_info=error)
            self._fault = str(error) or type(error).__name__

    def _content(self, chunk: int, held: list[str | None]) -> Steps[Content]:
        offset, size = self._plan.extent(chunk)
        content = Content(offset, self._bucket[offset : offset + size])
        return sent_as(self._changes, chunk, content, held)
