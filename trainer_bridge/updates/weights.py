"""What a trainer updates from: a model whose tensors are all at hand, or a stream of them."""

import hashlib
import logging
import time
from collections.abc import Collection, Iterator
from itertools import chain

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.values import attempt
from trainer_bridge.engines.engine_client import EngineClient, EngineError
from trainer_bridge.ranks.collective import Leader, check_ranks
from trainer_bridge.session.kept import KEPT
from trainer_bridge.session.transaction import BeginResult, Transaction
from trainer_bridge.session.update_session import UpdateSession
from trainer_bridge.shards.placed_shards import (
    CodesWanted,
    PlacedShards,
    ShardReport,
    Shards,
)
from trainer_bridge.sources import hf_names
from trainer_bridge.sources.announcement import Announcement
from trainer_bridge.sources.parameters import Named, NamedTensors, check_readable, listed
from trainer_bridge.sources.tied_head import (
    as_words,
    check_head,
    on_all_ranks,
    repeats_embedding,
    repeats_here,
)
from trainer_bridge.transfer.layout import sources_for
from trainer_bridge.transfer.transfer_plan import TransferPlan
from trainer_bridge.updates.shared_sending import Part, end_together, is_on_all, send_together
from trainer_bridge.ways.sender import Sender

logger = logging.getLogger(__name__)

CODES_S = 60.0
"""Seconds that the first rank waits until all others have quantized their shards."""


Report = tuple[ShardReport, ShardReport | EngineError, bool | None] | None
"""Where the shards of a rank lie, their codes, and whether its head is the embedding; None where
nothing is to be told."""


class Clock:
    """Adds up wall time by stage."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        """Count the time since the last lap to ``stage``."""
        now = time.perf_counter()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        """Seconds of each stage and of all."""
        return {**self._seconds, "total": time.perf_counter() - self._started}


class Weights:
    """The weights of one update. Every rank calls, and only the leader has a transaction."""

    def __init__(self) -> None:
        self.named: Named = []
        """All tensors, or none of a stream."""
        self.codes_wanted: CodesWanted | None = None
        """On the leader, behind ``send``: what all ranks quantize from the next update on."""

    def check(self, ranks: tuple[int, ...]) -> None:
        """Raise what is wrong with them on this rank, of those that update together."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """One more, behind the others: the leader's own."""
        raise NotImplementedError

    def report(self, ranks: int) -> Report:
        """What the leader must know of this rank, one of so many, to plan."""
        return None

    def assemble(self, leader: Leader, reports: list[Report] | None) -> None:
        """Join the reports of all ranks on the leader; the others start to quantize."""

    def plan(
        self, sender: Sender, client: EngineClient, device: torch.device | None
    ) -> TransferPlan:
        """What the leader sends, and how."""
        raise NotImplementedError

    def send(
        self, leader: Leader, transaction: Transaction | None, begun: BeginResult, clock: Clock
    ) -> None:
        """Gather every tensor on all ranks, in one order; the leader puts them into the bucket, and
        others may send a part."""
        raise NotImplementedError

    def committed(self, codes: CodesWanted | None, opened: Collection[str]) -> None:
        """The engines have them.

        Args:
            codes: ``codes_wanted``, as the leader has it.
            opened: seeds of the shards and codes that engines have open, as the leader knows it.
        """

    def close(self) -> None:
        """The update is over, however it ended."""

    def exhaust(self) -> None:
        """Take part in what is left of the collectives: other ranks wait for them. Of a whole model
        none is: a failure reaches every rank before the next tensor."""

    def digest(self) -> str:
        """Tells them from others, on this rank; "" where they are gone, or it cannot."""
        return ""


class WholeModel(Weights):
    """A module, a mapping or a list: planned once, and read in place where nothing moves."""

    def __init__(
        self, model_or_named_tensors: nn.Module | NamedTensors, fault: Exception | None = None
    ) -> None:
        super().__init__()
        self.family: str | None = None
        if isinstance(model_or_named_tensors, nn.Module):
            self.family = hf_names.model_type(model_or_named_tensors)
        # a fault waits for ``check``: the other ranks must hear of it
        self.named, found = listed(model_or_named_tensors)
        self._fault = fault or found
        self._placed: ShardReport = None
        self._stays: Shards | None = None
        """On the leader: where all ranks hold them, if none has moved."""
        self._shards: Shards | None = None
        """The same, with codes of some beside them where ranks have made any."""
        self._ranks = 1
        self._repeats: bool | None = None
        """Whether the head is the embedding, on all ranks."""
        self._part: Part | None = None
        """What this rank sends, where several do and it does not lead."""

    def check(self, ranks: tuple[int, ...]) -> None:
        if self._fault is not None:
            raise self._fault
        check_ranks(self.named, ranks)
        for name, tensor in self.named:
            check_readable(name, tensor)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.named = [*self.named, (name, tensor)]

    def report(self, ranks: int) -> Report:
        self._ranks = ranks
        if ranks == 1:
            return None
        self._placed, error = attempt(KEPT.shards.place, self.named)
        if error is not None:  # whatever this rank holds, the leader waits for each
            logger.warning("weights are gathered, which is slower", exc_info=error)
        placed = self._placed
        own = KEPT.shards.own(placed) if isinstance(placed, str) else None
        return placed, KEPT.codes.ready(self.named, own), repeats_here(self.named)

    def assemble(self, leader: Leader, reports: list[Report] | None) -> None:
        if leader.is_alone:
            return
        if reports is None:  # the first rank waits for its GPU once more, as it plans
            KEPT.codes.start()
        self._shards = leader.attempt(self._assemble, reports)

    def _assemble(self, reports: list[Report]) -> Shards | None:
        placed, codes, repeats = map(list, zip(*(each for each in reports if each), strict=True))
        self._repeats = on_all_ranks(repeats)
        self._stays = KEPT.shards.assemble(placed, self.named)
        return KEPT.codes.assemble(self._stays, codes)

    def plan(
        self, sender: Sender, client: EngineClient, device: torch.device | None
    ) -> TransferPlan:
        if self._ranks > 1:
            KEPT.codes.start()
        elif sender.layout["tied"]:
            self._repeats = repeats_embedding(self.named)
        check_head(self.named, sender.layout["tied"], self._repeats)
        self.named = sender.settled(self.named, device)
        ranks = 1
        if sender.carrier(device).is_far and is_on_all(self.named, self._ranks):
            ranks = self._ranks
        return sender.plan(self.named, self.family, device, shards=self._shards, ranks=ranks)

    def send(
        self, leader: Leader, transaction: Transaction | None, begun: BeginResult, clock: Clock
    ) -> None:
        if self._stays is not None:
            self.codes_wanted = leader.attempt(self._decide, transaction)
        if begun.reads_codes:
            _, error = attempt(KEPT.codes.check)
            faults = leader.collect(None if error is None else str(error), CODES_S)
            leader.attempt(_raise_first, faults)
            clock.lap("quantize")
        if all(map(all, begun.mapped)):
            return  # engines read everything in place
        sessions = [None] * len(begun.layouts) if transaction is None else transaction.sessions
        is_one = leader.is_alone and len(sessions) == 1
        if is_one and leader.attempt(UpdateSession.pack_in_place, sessions[0], self.named):
            clock.lap("write")
            return
        together, named = None, self.named
        if begun.in_parts:
            together = send_together(leader, transaction, named, self.family)
        if together is not None:
            self._part, named = together
        planned = [
            sources_for(named, self.family, layout) if session is None else session.plan.sources
            for layout, session in zip(begun.layouts, sessions, strict=True)
        ]
        for index, (_, tensor) in enumerate(named):
            wholes: dict[torch.dtype, torch.Tensor] = {}
            for session, sources, mapped in zip(sessions, planned, begun.mapped, strict=True):
                source = sources[index]
                if mapped[index] or not source.cuts:
                    continue
                if source.held_as not in wholes:
                    wholes[source.held_as] = source.read(tensor)
                clock.lap("read")
                leader.attempt(UpdateSession.put, session, index, wholes[source.held_as])
                if self._part is not None:
                    self._part.put(index, wholes[source.held_as])
                clock.lap("write")
        if together is not None:
            end_together(leader, transaction, self._part)

    def _decide(self, transaction: Transaction) -> CodesWanted | None:
        readers = [(each.sender.layout, len(each.members)) for each in transaction.sessions]
        wanted, error = attempt(KEPT.codes.decide, self._stays, self.named, self.family, readers)
        if error is not None:
            logger.warning("shards are not quantized, which is slower", exc_info=error)
        return wanted

    def committed(self, codes: CodesWanted | None, opened: Collection[str]) -> None:
        if self._part is not None:
            self._part.committed()
        if self._ranks == 1:
            return
        placed = self._placed
        seed = placed.placement.seed if isinstance(placed, PlacedShards) else placed
        KEPT.codes.committed(seed, codes, opened)

    def close(self) -> None:
        if self._part is not None:
            self._part.close()

    def digest(self) -> str:
        found, error = attempt(weights_digest, self.named)
        if error is not None:
            logger.warning("a second try will not be compared with this one", exc_info=error)
        return found or ""


class Stream(Weights):
    """An iterator of (HF name, whole tensor): walked once, and no tensor is kept.

    A tensor is read before the next one is asked for, so the iterator may reuse its memory. A GPU
    reads it in its turn on the current stream, on which the iterator must write too, or wait.
    """

    def __init__(
        self, tensors: Iterator[tuple[str, torch.Tensor]], announcement: Announcement | None
    ) -> None:
        super().__init__()
        self._tensors, self._announcement = tensors, announcement
        self._added: Named = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._added.append((name, tensor))

    def plan(
        self, sender: Sender, client: EngineClient, device: torch.device | None
    ) -> TransferPlan:
        added = sender.settled(self._added, device)
        return sender.stream_plan(client, self._announcement, added, device)

    def send(
        self, leader: Leader, transaction: Transaction | None, begun: BeginResult, clock: Clock
    ) -> None:
        sessions = [] if transaction is None else transaction.sessions
        for name, tensor in chain(self._tensors, self._added):
            if isinstance(tensor, DTensor):
                check_readable(name, tensor)
                if leader.is_alone and tensor.device_mesh.size() > 1:
                    raise ManifestError(
                        f"{name} is sharded over {tensor.device_mesh.size()} ranks; pass group=, "
                        f"the process group of the ranks that stream together"
                    )
                tensor = tensor.full_tensor()
            clock.lap("read")
            for session in sessions:
                leader.attempt(UpdateSession.put_named, session, name, tensor)
            clock.lap("write")
        for session in sessions:
            leader.attempt(UpdateSession.end_stream, session)

    def exhaust(self) -> None:
        for _ in self._tensors:
            pass


def _raise_first(faults: list[str | None]) -> None:
    for rank, fault in enumerate(faults):
        if fault is not None:
            raise EngineError(f"on rank {rank} of the trainer: {fault}")


def weights_digest(named: Named) -> str:
    """SHA-256 over name, type, shape and the sum of the bits of each tensor, or this rank's shard.

    The sum is of 64-bit words, or of narrower ones where a tensor has no whole number of them. A
    step of an optimizer changes it; words that change places do not.
    """
    found = []
    for name, tensor in named:
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        words = as_words(local.contiguous().view(-1), local.nbytes)
        total = words.sum(dtype=torch.int64)
        found.append((name, str(local.dtype), tuple(local.shape), total))
    # sums are read when all are queued; in one order, whatever the trainer's is
    content = sorted((*described, int(total)) for *described, total in found)
    return hashlib.sha256(repr(content).encode()).hexdigest()
