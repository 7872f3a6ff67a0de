"""Ranks of a trainer that each send a part of the chunks to engines on other hosts.

Each rank has every parameter whole for a moment, since ranks gather together. So each quantizes and
sends its own chunks, over its own link; the first rank begins the update, and has engines vote.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.tensor import DTensor

from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.values import attempt
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.ranks.collective import Leader
from trainer_bridge.ranks.rank_values import exchanged
from trainer_bridge.session.kept import KEPT
from trainer_bridge.session.participant import Participant, kept_alive
from trainer_bridge.session.transaction import Transaction
from trainer_bridge.session.update_session import UpdateSession
from trainer_bridge.sources.parameters import Named, mesh_size
from trainer_bridge.transfer.layout import gpu_of
from trainer_bridge.transport.rank_client import EngineRanks, Engines
from trainer_bridge.transport.relay_client import RelayClient
from trainer_bridge.ways.carriers import Chunks
from trainer_bridge.ways.remote import as_sent
from trainer_bridge.ways.sender import Sender

logger = logging.getLogger(__name__)
T = TypeVar("T")

CONNECT_S = 10.0
"""Seconds that a connection may take, while engines wait."""
WAIT_S = 240.0
"""Seconds that a rank may take over its part of an update."""


@exchanged
class SendResult(NamedTuple):
    """What a rank has sent."""

    fault: str | None
    """What is wrong with this rank's part; no engine is to blame."""
    errors: dict[str, str]
    """Why engines did not get it, by name."""
    network_bytes: int


@exchanged
@dataclass(frozen=True)
class Offer:
    """What the rank that leads tells the others of an update that they send together."""

    senders: int
    relays: dict[str, tuple[dict[str, Any], str, float]]
    """Of the engines, by name: where each is, the session's token, and seconds that the engine may
    take over a step."""
    layout: dict[str, Any]
    fingerprint: str
    """Of the manifest, which each rank makes for itself."""
    added: Named
    """Behind what all ranks hold."""
    bases: tuple[str, str]
    """See ``Carrier.bases``."""


@dataclass(eq=False)
class Reached:
    """An engine that this rank sends to."""

    name: str
    relay: RelayClient
    ranks: EngineRanks | None
    """The same, until it failed."""


class Part:
    """What a rank sends that does not lead: every so many-th chunk.

    Args:
        number: its place among the ranks that send.

    Raises:
        EngineError: an engine cannot be reached from here.
        ManifestError: this rank holds another model.
    """

    def __init__(self, offer: Offer, number: int, named: Named, family: str | None) -> None:
        sender = KEPT.part
        if sender is None or sender.layout != offer.layout:
            sender = KEPT.part = Sender(offer.layout)
        device = gpu_of(named, offer.layout)
        plan = sender.plan(named, family, device, ranks=offer.senders)
        if plan.manifest.fingerprint != offer.fingerprint:
            raise ManifestError("it has other tensors than the first rank")
        self._plan, self._sender, self._device = plan, sender, device
        self._changes = KEPT.bases.changes(*offer.bases)
        self._fault: str | None = None
        self._errors: dict[str, str] = {}
        """Why engines did not get this part, by name."""
        self._reached: list[Reached] = []
        sender.join(self)
        try:
            # in host memory, only the pages of this rank's slots are ever touched
            self._packer = sender.fill(plan, device)
            self._packer.begin()
            for engine, (where, token, timeout_s) in offer.relays.items():
                relay = RelayClient(where, token, None, timeout_s, CONNECT_S)
                self._reached.append(Reached(engine, relay, relay))
        except BaseException:
            self._hang_up()
            sender.leave(self)
            raise
        filled, content = partial(sender.content, plan), partial(as_sent, self._changes)
        engines = Engines(self._reached, partial(_lose, self._errors))  # self would be a cycle
        self._chunks = Chunks(plan, engines, filled, content, self._packer, number, offer.senders)

    def put(self, index: int, whole: torch.Tensor) -> None:
        """Put a parameter in; whatever fails is told at the end."""
        shape = self._plan.sources[index].shape
        if whole.shape != shape:
            self._fault = f"a parameter of shape {tuple(shape)} was gathered as {whole.shape}"
        self._try(self._chunks.put, index, whole.to(self._device or "cpu"))

    def finish(self) -> SendResult:
        """Send what is left, and wait until engines have read it."""
        self._try(self._chunks.flush)
        self._chunks.await_read()  # also behind a fault: engines go on reading
        self._try(self._packer.finish)
        network_bytes = sum(engine.relay.network_bytes for engine in self._reached)
        return SendResult(self._fault, self._errors, network_bytes)

    def committed(self) -> None:
        """The engines have what was sent."""
        if self._changes is not None:
            _, error = attempt(KEPT.bases.keep, self._changes)
            if error is not None:  # the next update is sent whole
                logger.error("what was sent is not kept", exc_info=error)

    def close(self) -> None:
        """Hang up."""
        self._hang_up()
        self._chunks.close()
        self._sender.leave(self)

    def _hang_up(self) -> None:
        for engine in self._reached:
            engine.relay.close()

    def _try(self, action: Callable[..., object], *args: Any) -> None:
        if self._fault is not None:
            return
        _, error = attempt(action, *args)
        if error is not None:
            logger.error("a rank could not send its part", exc_info=error)
            self._fault = str(error) or type(error).__name__


def _lose(errors: dict[str, str], engine: Reached, error: EngineError) -> None:
    """The rank that leads decides what becomes of it."""
    errors[engine.name], engine.ranks = str(error), None
    engine.relay.close()


def send_together(
    leader: Leader, transaction: Transaction | None, named: Named, family: str | None
) -> tuple[Part | None, Named] | None:
    """Have ranks send chunks of their own; None where the first one sends all. Every rank calls.

    They can where each gathers every tensor: what is not sharded over all of them is the first
    rank's own.

    Returns:
        the part of a rank that sends and does not lead, and what is sent, the same on each rank.
    """
    offer: Any = leader.share(leader.attempt(_offer, transaction, named))
    named = named + (offer.added if leader.rank else [])
    fits = is_on_all(named, leader.size)
    part, why = None, None if fits else f"rank {leader.rank} holds other tensors"
    # evenly among the ranks, which are ordered by host
    places = [number * leader.size // offer.senders for number in range(offer.senders)]
    if leader.rank and leader.rank in places and fits:
        number = places.index(leader.rank)
        part, error = attempt(Part, offer, number, named, family)
        if error is not None:
            why = f"rank {leader.rank}: {str(error) or type(error).__name__}"
    members = () if transaction is None else transaction.active
    shared = False
    try:
        faults = _collect(leader, members, why)
        shared = leader.share(bool(leader.attempt(_begin, transaction, faults, offer.senders)))
    finally:
        if part is not None and not shared:
            part.close()
    return (part, named) if shared else None


def end_together(leader: Leader, transaction: Transaction | None, part: Part | None) -> None:
    """Wait until every rank has sent its part; every rank calls."""
    for session in () if transaction is None else transaction.sessions:
        leader.attempt(UpdateSession.send_rest, session)
    sent = SendResult(None, {}, 0) if part is None else part.finish()
    if transaction is None:
        leader.collect(sent)
        return
    if leader.error is not None:  # others, who go on sending, hear of it
        transaction.close(leader.error)
    of_ranks, late = attempt(_collect, leader, transaction.active, sent)
    if late is not None and leader.error is None:
        raise late
    leader.attempt(_note, transaction, of_ranks)


def is_on_all(named: Named, ranks: int) -> bool:
    """Whether every weight is sharded over so many ranks, so that each of them gathers it."""
    return all(
        isinstance(tensor, DTensor) and mesh_size(tensor.device_mesh) == ranks
        for name, tensor in named
        if name != KV_SCALES
    )


def _offer(transaction: Transaction, named: Named) -> Offer:
    (session,) = transaction.sessions
    relays = {member.name: member.ranks for member in transaction.active}
    return Offer(
        session.plan.senders,
        {
            name: (relay.where, relay.token, relay.timeout_s)
            for name, relay in relays.items()
            if isinstance(relay, RelayClient)
        },
        session.sender.layout,
        session.plan.manifest.fingerprint,
        [(name, tensor) for name, tensor in named if name == KV_SCALES],
        session.carrier.bases,
    )


def _collect(leader: Leader, members: Sequence[Participant], value: T) -> list[T] | None:
    """``Leader.collect`` of ranks that share an update, while these engines wait."""
    with kept_alive(members):
        return leader.collect(value, WAIT_S)


def _begin(transaction: Transaction, faults: list[str | None], senders: int) -> bool:
    (session,) = transaction.sessions
    if found := [fault for fault in faults if fault is not None]:
        logger.warning("from now on the first rank sends all, which is slower: %s", found[0])
        session.sender.sends_alone = True  # engines waited for what did not come
        return False
    session.chunks.senders = senders
    return True


def _note(transaction: Transaction, of_ranks: list[SendResult]) -> None:
    """Go on without engines that a rank could not send to.

    Raises:
        EngineError: too few are left, or a rank could not send at all.
    """
    (session,) = transaction.sessions
    for rank, sent in enumerate(of_ranks):
        if sent.fault is not None:
            raise EngineError(f"on rank {rank} of the trainer: {sent.fault}")
        session.network_bytes_of_others += sent.network_bytes
        for member in [each for each in transaction.active if each.name in sent.errors]:
            error = sent.errors[member.name]
            transaction.lose(member, EngineError(f"on rank {rank} of the trainer: {error}"))
