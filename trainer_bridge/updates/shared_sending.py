"""Ranks of a trainer that each send a part of the chunks to engines on other hosts.

Each rank has every parameter whole for a moment, since ranks gather together. So each quantizes and
sends its own chunks, over its own link; the first rank begins the update, and has engines vote.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sgl_fp8rl.formats import by_tensor
from sgl_fp8rl.protocol.attempt import attempt
from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import SLOTS, ManifestError
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.ranks.collective import Leader
from trainer_bridge.ranks.rank_values import exchanged
from trainer_bridge.session.keep_alive import collect_alive
from trainer_bridge.session.kept import KEPT
from trainer_bridge.session.part_sender import PartSender, Relay, Sent
from trainer_bridge.session.transaction import Transaction
from trainer_bridge.sources.parameters import Named, mesh_size
from trainer_bridge.transfer.layout import gpu_of, sources_for
from trainer_bridge.transfer.transfer_plan import TransferPlan
from trainer_bridge.transport.relay_client import RelayClient

logger = logging.getLogger(__name__)


@exchanged
@dataclass(frozen=True)
class Offer:
    """What the rank that leads tells the others of an update that they send together."""

    senders: int
    relays: dict[str, Relay]
    """Of the engines, by name."""
    layout: dict[str, Any]
    fingerprint: str
    """Of the manifest, which each rank makes for itself."""
    chunk_bytes: int
    slots: int
    codes: str | None
    added: Named
    """Behind what all ranks hold."""
    images: tuple[str, str]
    """See ``UpdateSession.images``."""


class SharedSending:
    """What this rank does when ranks send together.

    Args:
        sender: of a rank that sends and does not lead.
        named: what is sent, the same on each rank.
    """

    def __init__(self, sender: PartSender | None, named: Named) -> None:
        self._sender, self.named = sender, named

    def put(self, index: int, whole: torch.Tensor) -> None:
        """Put a parameter in that all ranks have gathered."""
        if self._sender is not None:
            self._sender.put(index, whole)

    def finish(self, leader: Leader, transaction: Transaction | None) -> None:
        """Wait until every rank has sent its part; every rank calls."""
        leader.attempt(Transaction.send_rest, transaction)
        sent = Sent(None, {}, 0) if self._sender is None else self._sender.finish()
        if transaction is None:
            leader.collect(sent)
            return
        if leader.error is not None:  # others, who go on sending, hear of it
            transaction.close(leader.error)
        of_ranks, late = attempt(collect_alive, leader, transaction.active, sent)
        if late is not None and leader.error is None:
            raise late
        leader.attempt(_note, transaction, of_ranks)

    def committed(self) -> None:
        """The engines have what was sent."""
        if self._sender is not None:
            self._sender.committed()

    def close(self) -> None:
        """It is over, however it ended."""
        if self._sender is not None:
            self._sender.close()


def send_together(
    leader: Leader, transaction: Transaction | None, named: Named, family: str | None
) -> SharedSending | None:
    """Have ranks send chunks of their own; None where the first one sends all. Every rank calls.

    They can where each gathers every tensor: what is not sharded over all of them is the first
    rank's own.
    """
    offer = leader.share(leader.attempt(_offer, transaction, named))
    if offer is None:
        return None
    named = named + (offer.added if leader.rank else [])
    fits = is_on_all(named, leader.size)
    sender, why = None, None if fits else f"rank {leader.rank} holds other tensors"
    # evenly among the ranks, which are ordered by host
    places = [number * leader.size // offer.senders for number in range(offer.senders)]
    if leader.rank and leader.rank in places and fits:
        number = places.index(leader.rank)
        sender, error = attempt(_follow, offer, number, named, family)
        if error is not None:
            why = f"rank {leader.rank}: {str(error) or type(error).__name__}"
    shared = False
    try:
        shared = leader.share(_all_can(leader, transaction, why, offer.senders))
    finally:
        if sender is not None and not shared:
            sender.close()
    return SharedSending(sender, named) if shared else None


def is_on_all(named: Named, ranks: int) -> bool:
    """Whether every weight is sharded over so many ranks, so that each of them gathers it."""
    return all(
        isinstance(tensor, DTensor) and mesh_size(tensor.device_mesh) == ranks
        for name, tensor in named
        if name != KV_SCALES
    )


def _all_can(
    leader: Leader, transaction: Transaction | None, why: str | None, senders: int
) -> bool:
    """Whether every rank that sends is connected, on the rank that leads.

    Args:
        why: this rank is not.
    """
    members = () if transaction is None else transaction.active
    faults = collect_alive(leader, members, why)
    return bool(leader.attempt(_begin, transaction, faults, senders))


def _offer(transaction: Transaction, named: Named) -> Offer | None:
    """None where the plan is for one rank that sends."""
    (session,) = transaction.sessions
    layout, manifest = session.sender.layout, session.plan.manifest
    senders = manifest.slots // SLOTS
    relays = {member.name: member.ranks for member in transaction.active}
    if senders < 2:
        return None
    return Offer(
        senders,
        {
            name: Relay(relay.where, relay.token, relay.timeout_s)
            for name, relay in relays.items()
            if isinstance(relay, RelayClient)
        },
        {name: layout[name] for name in ("dtype", "fp32", "formats", "gpus", "skipped", "tied")},
        manifest.fingerprint,
        manifest.chunk_bytes,
        manifest.slots,
        manifest.codes,
        [(name, tensor) for name, tensor in named if name == KV_SCALES],
        session.images,
    )


def _begin(transaction: Transaction, faults: list[str | None], senders: int) -> bool:
    (session,) = transaction.sessions
    if found := [fault for fault in faults if fault is not None]:
        logger.warning("from now on the first rank sends all, which is slower: %s", found[0])
        session.sender.sends_alone = True  # engines waited for what did not come
        return False
    session.send_every(senders)
    return True


def _note(transaction: Transaction, of_ranks: list[Sent]) -> None:
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


def _follow(offer: Offer, number: int, named: Named, family: str | None) -> PartSender:
    """Get ready on a rank that does not lead.

    Raises:
        EngineError: an engine cannot be reached from here.
        ManifestError: this rank holds another model.
    """
    plan = _plan(offer, named, family)
    if plan.manifest.fingerprint != offer.fingerprint:
        raise ManifestError("it has other tensors than the first rank")
    return PartSender(
        plan,
        gpu_of(named, offer.layout),
        getattr(torch, offer.layout["dtype"]),
        number,
        offer.senders,
        offer.relays,
        offer.images,
        KEPT.images,
    )


def _plan(offer: Offer, named: Named, family: str | None) -> TransferPlan:
    """Made again only for another manifest, or for other tensors."""
    tensors = tuple((name, tensor.dtype, tensor.shape) for name, tensor in named)
    made_for = offer.fingerprint, family, tensors
    if KEPT.part is None or KEPT.part[0] != made_for:
        plan = TransferPlan(
            sources_for(named, family, offer.layout),
            [False] * len(named),
            offer.chunk_bytes,
            by_tensor(offer.layout["formats"]),
            slots=offer.slots,
            codes=offer.codes,
        )
        KEPT.part = made_for, plan
    return KEPT.part[1]
