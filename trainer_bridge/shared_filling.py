"""Ranks of one host fill one bucket with what they hold of a sharded model; nothing is gathered."""

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sgl_fp8rl.protocol.attempt import attempt
from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import ManifestError
from trainer_bridge.collective import Leader
from trainer_bridge.filler import Filler, ShardSlice
from trainer_bridge.keep_alive import collect_alive
from trainer_bridge.layout import sources_for
from trainer_bridge.packer import HostPacker
from trainer_bridge.rank_values import exchanged
from trainer_bridge.shard_ranges import Owners, Range, assign, held_here
from trainer_bridge.sources import Named, Source
from trainer_bridge.transaction import Transaction
from trainer_bridge.transfer_plan import TransferPlan
from trainer_bridge.transport.board import Board, open_board

logger = logging.getLogger(__name__)


@exchanged
@dataclass(frozen=True)
class Offer:
    """What the rank that leads tells the others of a bucket that they fill together."""

    owners: Owners
    address: tuple[str, str, str]
    fingerprint: str
    """Of the manifest, which each rank makes for itself."""
    chunk_bytes: int
    slots: int
    codes: str | None
    kv_scales: tuple[int, ...] | None
    """Their shape, where the update brings any."""


class Follower:
    """The filling of a rank that does not lead."""

    def __init__(self, board: Board, plan: TransferPlan, rank: int) -> None:
        self._board, self._plan, self._rank = board, plan, rank
        packer = HostPacker(plan, board.bucket)
        self._filler = Filler(plan, lambda chunk: board.fill(chunk + 1), board.await_slot, packer)
        self._is_over = False

    def put(self, index: int, shard_slice: ShardSlice | None) -> None:
        """As of a ``Filler``; a failure is logged here, and raised where the update is led."""
        self._try(lambda: self._filler.put(index, shard_slice))

    def finish(self) -> None:
        """Go to the end: the rank that leads has the KV scales."""
        scales = self._plan.index_of(KV_SCALES)
        if scales is not None:
            self.put(scales, None)
        self._try(self._filler.finish)

    def _try(self, action: Any) -> None:
        if self._is_over:
            return
        _, error = attempt(action)
        if error is not None:
            why = "rank %d could not write its shard of the weights"
            logger.error(why, self._rank, exc_info=error)
            self.fail()

    def fail(self) -> None:
        """Write no more, and tell the rank that leads."""
        self._is_over = True
        self._board.fail()


class SharedFilling:
    """What this rank does when ranks fill the bucket together.

    Args:
        follower: of a rank that does not lead.
    """

    def __init__(self, owners: Owners, rank: int, follower: Follower | None) -> None:
        self._owners, self._rank, self.follower = owners, rank, follower

    def fail(self) -> None:
        """Tell the rank that leads of an error that ends the update here; where it leads itself, it
        tells the others as it closes."""
        if self.follower is not None:
            self.follower.fail()

    def read(self, index: int, source: Source, tensor: torch.Tensor) -> ShardSlice | None:
        """What this rank writes of a parameter; a collective where it must be gathered."""
        owners = self._owners[index]
        if owners is None:
            whole = source.read(tensor)
            return (whole, 0) if self._rank == 0 else None
        held: Range | None = owners.get(self._rank)
        if held is None:
            return None
        assert isinstance(tensor, DTensor)
        return tensor.detach().to_local().contiguous(), held[0]  # type: ignore[attr-defined]


def fill_together(
    leader: Leader,
    transaction: Transaction | None,
    named: Named,
    family: str | None,
    layouts: list[dict[str, Any]],
) -> SharedFilling | None:
    """Have the ranks fill the bucket together, where they can; None where they gather.

    They can where all are on one host, the engines too, of one layout and on a CPU: what goes over
    a network is quantized, which needs whole parameters. Every rank calls.
    """
    sharded = any(isinstance(tensor, DTensor) for _, tensor in named)
    if leader.is_alone or not sharded or len(layouts) != 1 or layouts[0]["gpus"]:
        return None
    members = () if transaction is None else transaction.active
    held = collect_alive(leader, members, held_here(named))
    offer = leader.share(leader.attempt(_offer, transaction, held, named, leader.size))
    if offer is None:
        return None
    follower, why = None, None
    if leader.rank:
        follower, error = attempt(_follow, offer, leader.rank, named, family, layouts[0])
        if error is not None:
            why = f"rank {leader.rank}: {str(error) or type(error).__name__}"
    faults = collect_alive(leader, members, why)
    if not leader.share(leader.attempt(_begin, transaction, faults, leader.size)):
        return None
    return SharedFilling(offer.owners, leader.rank, follower)


def _offer(
    transaction: Transaction, held: list[list[Range | None]], named: Named, ranks: int
) -> Offer | None:
    (session,) = transaction.sessions
    board = None if session.device is not None else session.sender.board(ranks)
    owners = assign(held, [tensor.numel() for _, tensor in named])
    if board is None or not any(owners) or session.plan.encodes:
        return None
    manifest = session.plan.manifest
    scales = manifest.tensors.get(KV_SCALES)
    return Offer(
        owners,
        board.address,
        manifest.fingerprint,
        manifest.chunk_bytes,
        manifest.slots,
        manifest.codes,
        None if scales is None else scales.shape,
    )


def _begin(transaction: Transaction, faults: list[str | None], ranks: int) -> bool:
    """Whether every rank has opened the bucket."""
    if found := [fault for fault in faults if fault is not None]:
        logger.warning("weights are gathered on one rank, which is slower: %s", found[0])
        return False
    (session,) = transaction.sessions
    board = session.sender.board(ranks)
    assert board is not None
    session.fill_together(board)
    return True


def _follow(
    offer: Offer, rank: int, named: Named, family: str | None, layout: dict[str, Any]
) -> Follower:
    """Get ready on a rank that does not lead.

    Raises:
        OSError: the bucket is on another host.
        ManifestError: this rank holds another model.
    """
    board = _board(offer.address, rank)
    if offer.kv_scales is not None:
        named = [*named, (KV_SCALES, torch.empty(offer.kv_scales, device="meta"))]
    sources = sources_for(named, family, layout)
    unmapped = [False] * len(named)
    plan = TransferPlan(sources, unmapped, offer.chunk_bytes, slots=offer.slots, codes=offer.codes)
    if plan.manifest.fingerprint != offer.fingerprint:
        raise ManifestError("it has other tensors than the first rank")
    return Follower(board, plan, rank)


@lru_cache(1)  # more would keep the memory of buckets that the first rank has let go
def _board(address: tuple[str, str, str], rank: int) -> Board:
    return open_board(address, rank)
