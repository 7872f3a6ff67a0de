"""The one choice among ways, and what a trainer keeps for engines of one layout: plans, and the
memory that they read."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import CHUNK_ALIGNMENT, ManifestError
from trainer_bridge.engines.engine_client import EngineClient
from trainer_bridge.shards.placed_shards import Shards
from trainer_bridge.sources.announcement import Announcement, announced
from trainer_bridge.sources.parameters import Named
from trainer_bridge.transfer.layout import check_kv_scales, format_of_codes, ignored, sources_for
from trainer_bridge.transfer.packer import HostPacker, Packer, QuantizePacker
from trainer_bridge.transfer.transfer_plan import TransferPlan, can_be_mapped, is_aligned
from trainer_bridge.transport.cuda_ipc import segments_message
from trainer_bridge.transport.rank_client import Content, EngineRanks, Engines
from trainer_bridge.ways.carriers import Bucket, Carrier
from trainer_bridge.ways.in_place import InPlace, OfShards, Parameters
from trainer_bridge.ways.remote import TCP


class Sender:
    """One trainer's side of the way to the engines of one layout.

    Engines share the bucket, so weights are put into it, and quantized, once for all of them.
    """

    def __init__(self, layout: dict[str, Any]) -> None:
        self.layout = layout
        self._plans: dict[tuple[bool, bool], tuple[Any, TransferPlan]] = {}
        self.ignored = ignored(layout)
        """What an update may bring that the engines keep nothing of."""
        self._stream: Named | None = None
        """What the last stream brought, in its order, as meta tensors."""
        self._stream_plans: dict[tuple[bool, torch.device | None], TransferPlan] = {}
        """How to send that again: with or without KV scales, and through which GPU."""
        self._kv_scales: torch.Tensor | None = None
        self.codes, self.shards = OfShards(layout, True), OfShards(layout, False)
        self.parameters = Parameters()
        self._ways: tuple[InPlace, ...] = (self.codes, self.shards, self.parameters)
        """For each parameter the first of these that finds it where it lay at the last update."""
        self._told: tuple[Any, dict[str, Any]] | None = None
        """What ranks were told of what they read in place, and what that was made of."""
        self._carriers: dict[torch.device | None, Carrier] = {}
        self._bucket: Bucket | None = None
        self._packer: tuple[TransferPlan, Bucket, Packer] | None = None
        self.is_shared = False
        """Whether several engines have this memory open: what is put into the bucket is quantized
        once for all of them."""
        self._users: set[object] = set()
        self.sends_alone = False
        """Whether some rank of the trainer could not connect to these engines."""

    def carrier(self, device: torch.device | None) -> Carrier:
        """The way of all that is not read in place."""
        if device not in self._carriers:
            way = TCP if self.layout["is_remote"] else Carrier
            self._carriers[device] = way(self.layout, device)
        return self._carriers[device]

    def share_with(self, engines: Iterable[object]) -> None:
        """Get ready for an update of these engines; others may have the memory open too."""
        self.is_shared = len(self._users.union(engines)) > 1

    def join(self, user: object) -> None:
        """Note that an engine has this memory open, or that a session fills it."""
        self._users.add(user)

    def leave(self, user: object) -> None:
        """Free the memory unless someone else has it open."""
        self._users.discard(user)
        if not self._users:
            self._forget_places()
            self._free_bucket()

    def settled(self, named: Named, device: torch.device | None) -> Named:
        """The same, with KV scales checked, and with a GPU as a copy at an address that stays.

        So they are read in place where the weights are, and are new at each step all the same.
        They come last.
        """
        *others, (name, scales) = named or [("", torch.empty(0))]
        if name != KV_SCALES:
            return named
        check_kv_scales(scales, self.layout.get("kv_cache"))
        if device is None:
            return named
        kept = self._kv_scales
        if kept is None or kept.device != device or kept.shape != scales.shape:
            kept = self._kv_scales = torch.empty(scales.shape, device=device)
        return [*others, (name, kept.copy_(scales.detach()))]

    def remember_stream(self, plan: TransferPlan, order: Iterable[int]) -> None:
        """Plan the next stream as this one came."""
        names = (plan.sources[index].cuts[0][0] for index in order)
        self._stream = [(name, plan.views[name][1]) for name in names if name != KV_SCALES]
        self._stream_plans.clear()

    def forget_stream(self) -> None:
        """Plan the next stream as it comes."""
        self._stream = None
        self._stream_plans.clear()

    def stream_plan(
        self,
        client: EngineClient,
        announcement: Announcement | None,
        added: Named,
        device: torch.device | None,
    ) -> TransferPlan:
        """The plan for a stream: that of the last one, or one that is made as tensors come.

        Args:
            added: what comes behind the stream.
        """
        way = bool(added), device
        kept = self._stream_plans.get(way)
        if kept is not None:
            self._forget_places()
            return kept
        layout, known = self.layout, self._stream
        if known is None:
            dtype, fp32 = getattr(torch, layout["dtype"]), layout["fp32"] or []
            named = announced(announcement, client, dtype, fp32)
        else:
            named = known
        named = [*named, *((name, tensor.to("meta")) for name, tensor in added)]
        plan = self.plan(named, None, device, streamed=known is None)
        if known is not None:
            self._stream_plans[way] = plan
        return plan

    def plan(
        self,
        named: Named,
        family: str | None,
        device: torch.device | None,
        streamed: bool = False,
        shards: Shards | None = None,
        ranks: int = 1,
    ) -> TransferPlan:
        """The plan for these tensors, made again where anything but values changed.

        Args:
            family: see ``sources.sources``.
            streamed: the tensors come in another order than this one.
            shards: of all ranks, where none has moved since the last update.
            ranks: how many may send together to engines on other hosts.
        """
        readable = [can_be_mapped(tensor) and tensor.device == device for _, tensor in named]
        carrier = self.carrier(device)
        chosen: dict[int, InPlace] = {}
        if not carrier.is_far:  # or nothing can be read in place
            for way in (self.codes, self.shards):
                chosen |= dict.fromkeys(way.choose(named, family, shards, chosen), way)
            able = self.parameters.choose(named, readable, self._kv_scales, self.is_shared, chosen)
            chosen |= dict.fromkeys(able, self.parameters)
        resident = [
            is_readable and is_aligned(tensor)
            for (_, tensor), is_readable in zip(named, readable, strict=True)
        ]
        tensors = tuple(
            (name, tensor.dtype, tensor.shape, isinstance(tensor, DTensor), is_resident, way)
            for (name, tensor), is_resident, way in zip(
                named, resident, map(chosen.get, range(len(named))), strict=True
            )
        )
        senders = 1 if streamed or self.sends_alone else carrier.senders(ranks)
        signature = family, carrier, senders, tensors
        has = bool(chosen), KV_SCALES in (name for name, _ in named)
        kept = self._plans.get(has)
        if kept is not None and kept[0] == signature and not streamed:
            return kept[1]

        def made(slots: int) -> TransferPlan:
            return TransferPlan(
                sources_for(named, family, self.layout),
                [index in chosen for index in range(len(named))],
                self.layout["bucket_bytes"] // slots // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT,
                carrier.quantized,
                [index for index, is_resident in enumerate(resident) if is_resident],
                streamed,
                slots,
                [index for index, way in chosen.items() if way is self.codes],
                format_of_codes(self.layout).name,
            )

        try:
            plan = made(carrier.slots * senders)
        except ManifestError:
            if senders == 1:
                raise
            plan = made(carrier.slots)  # a row of blocks is larger than such a chunk
        if not streamed:
            self._plans[has] = (signature, plan)
        return plan

    def share(
        self,
        ranks: EngineRanks | Engines[Any],
        plan: TransferPlan,
        device: torch.device | None,
        users: Iterable[object],
    ) -> Packer | None:
        """Have the engines open the memory that this plan needs.

        Args:
            device: the trainer's GPU, or None where it has none that the engine can read.
            users: who joined of those that have begun this update.

        Returns:
            what fills the bucket, or None where everything is mapped.
        """
        if any(plan.mapped):
            message = self._segments(plan)
            if message["name"] not in ranks.known:
                ranks.ask(message)
        if not plan.streamed and not any(plan.spans):
            if self._users <= {*users}:  # another engine may have the bucket open
                self._free_bucket()  # every rank let go of it before it answered
            return None
        return self.fill(plan, device, ranks)

    def fill(
        self,
        plan: TransferPlan,
        device: torch.device | None,
        ranks: EngineRanks | Engines[Any] | None = None,
    ) -> Packer:
        """What fills the bucket.

        Args:
            ranks: have it open then; none are told where another rank of the trainer has.
        """
        place = torch.device("cpu") if device is None else device
        nbytes, previous = plan.manifest.bucket_bytes, self._bucket
        kept = previous and (previous.content.device, previous.content.numel())
        if kept != (place, nbytes):
            self._bucket = Bucket(nbytes, device, not self.carrier(device).is_far)
        assert self._bucket is not None
        if ranks is not None:
            self._bucket.share(ranks)
        if previous is not None and previous is not self._bucket:
            previous.close()  # every rank let go of it as it opened the new one
        if self._packer is None or self._packer[:2] != (plan, self._bucket):
            content, dtype = self._bucket.content, getattr(torch, self.layout["dtype"])
            on_host = device is None
            packer = HostPacker(plan, content) if on_host else QuantizePacker(plan, content, dtype)
            self._packer = plan, self._bucket, packer
        return self._packer[2]

    @property
    def reads_shards(self) -> bool:
        """Whether the plan that was asked for last maps shards of several ranks."""
        return bool(self.codes.found or self.shards.found)

    @property
    def opened(self) -> tuple[str, ...]:
        """Seeds of the shards and codes that ``share`` had engines open."""
        used = (way for way in (self.codes, self.shards) if way.found)
        return tuple(seed for way in used for seed in way.memory[0])

    def content(self, plan: TransferPlan, chunk: int) -> Content:
        """What the bucket holds of a chunk."""
        if self._bucket is None:  # all is read in place
            return Content(0, torch.empty(0, dtype=torch.uint8))
        offset, size = plan.extent(chunk)
        return Content(offset, self._bucket.content[offset : offset + size])

    @property
    def _used(self) -> list[InPlace]:
        return [way for way in self._ways if way.found]

    def _segments(self, plan: TransferPlan) -> dict[str, Any]:
        """What ranks need for this plan, which maps what was chosen."""
        memories = [way.memory for way in self._used]
        if self._told is None or self._told[0] != (memories, plan):
            seeds: list[str] = []
            handles: list[Any] = []
            places = {}
            for way, (of, opened) in zip(self._used, memories, strict=True):
                for name, pieces in way.pieces(plan).items():
                    places[name] = [
                        piece._replace(segment=len(handles) + piece.segment) for piece in pieces
                    ]
                seeds += of
                handles += opened
            self._told = (memories, plan), segments_message(seeds, handles, places)
        return self._told[1]

    def _forget_places(self) -> None:
        for way in self._ways:
            way.forget()
        self._told = None

    def _free_bucket(self) -> None:
        self._packer = None
        bucket, self._bucket = self._bucket, None  # engines that are told at once may both be here
        if bucket is not None:
            bucket.close()
