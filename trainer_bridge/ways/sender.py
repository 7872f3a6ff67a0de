"""What a trainer keeps for engines of one layout: plans, and the memory that they read."""

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from sgl_fp8rl.formats import by_tensor
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import CHUNK_ALIGNMENT, ManifestError
from trainer_bridge.engines.engine_client import EngineClient
from trainer_bridge.shards.placed_shards import Shards
from trainer_bridge.sources.announcement import Announcement, announced
from trainer_bridge.sources.parameters import Named
from trainer_bridge.transfer.layout import (
    check_kv_scales,
    format_of_codes,
    ignored,
    senders_of,
    slots_for,
    sources_for,
)
from trainer_bridge.transfer.packer import Packer, packer_on
from trainer_bridge.transfer.transfer_plan import Signature, TransferPlan, can_be_mapped, is_aligned
from trainer_bridge.transport.bucket import Bucket, bucket_on
from trainer_bridge.transport.rank_client import Content, Ranks
from trainer_bridge.ways.in_place import InPlace


class Sender:
    """One trainer's side of the way to the engines of one layout.

    Engines share the bucket, so weights are put into it, and quantized, once for all of them.

    Args:
        layout: as the engines report it; they agree in all of it that is read here.
    """

    def __init__(self, layout: dict[str, Any]) -> None:
        self.layout = layout
        self._plans: dict[tuple[bool, bool], tuple[Signature, TransferPlan]] = {}
        self.ignored = ignored(layout)
        """What an update may bring that the engines keep nothing of."""
        self._stream: Named | None = None
        """What the last stream brought, in its order, as meta tensors."""
        self._stream_plans: dict[tuple[bool, torch.device | None], TransferPlan] = {}
        """How to send that again: with or without KV scales, and through which GPU."""
        self._kv_scales: torch.Tensor | None = None
        self._bucket: Bucket | None = None
        self._in_place = InPlace(layout)
        self._packer: tuple[TransferPlan, Bucket, Packer] | None = None
        self.is_shared = False
        """Whether several engines have this memory open: what is put into the bucket is quantized
        once for all of them."""
        self._users: set[object] = set()
        self.sends_alone = False
        """Whether some rank of the trainer could not connect to these engines."""

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
            self._in_place.forget()
            self._free_bucket()

    def settled(self, named: Named, device: torch.device | None) -> Named:
        """The same, with KV scales checked, and with a GPU as a copy at an address that stays.

        So they are read in place where the weights are, and are new at each step all the same.
        They come last.

        Raises:
            ManifestError: the engines have no FP8 KV cache, or one of other layers or heads.
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
        """Plan the next stream as this one came.

        Args:
            order: the sources, as they came.
        """
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
            client: one of the engines.
            added: what comes behind the stream.

        Raises:
            EngineError: the engine cannot be reached.
            ManifestError: the tensors of the stream are not known.
        """
        way = bool(added), device
        kept = self._stream_plans.get(way)
        if kept is not None:
            self._in_place.forget()
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

        What the engine keeps in FP8 is sent so by a GPU, and through host memory to another host or
        to GPUs.

        Args:
            family: see ``sources.sources``.
            streamed: the tensors come in another order than this one.
            shards: of all ranks, where none has moved since the last update.
            ranks: how many may send together to engines on other hosts.

        Raises:
            ManifestError: the tensors cannot make an update.
        """
        layout = self.layout
        readable = [can_be_mapped(tensor) and tensor.device == device for _, tensor in named]
        scales = self._kv_scales
        # for several engines, what is whole here is quantized once
        alone = [
            is_readable and not layout["is_remote"] and (tensor is scales or not self.is_shared)
            for (_, tensor), is_readable in zip(named, readable, strict=True)
        ]
        in_reach = None if device is None or layout["is_remote"] else shards
        mapped = self._in_place.choose(named, family, alone, scales, in_reach)
        resident = [
            is_readable and is_aligned(tensor)
            for (_, tensor), is_readable in zip(named, readable, strict=True)
        ]
        coded = self._in_place.coded
        tensors = tuple(
            (name, tensor.dtype, tensor.shape, isinstance(tensor, DTensor), *ways, index in coded)
            for index, ((name, tensor), ways) in enumerate(
                zip(named, zip(resident, mapped, strict=True), strict=True)
            )
        )
        slots = slots_for(device, layout)
        senders = 1
        if layout["is_remote"] and not streamed and not self.sends_alone:
            senders = senders_of(ranks, layout["bucket_bytes"])
        signature = family, device, senders, tensors
        way = any(mapped), KV_SCALES in (name for name, _ in named)
        kept = self._plans.get(way)
        if kept is not None and kept[0] == signature and not streamed:
            return kept[1]
        is_encoded = device is not None or layout["through_host"] or layout["is_remote"]
        quantized = by_tensor(self.layout["formats"]) if is_encoded else {}
        make = partial(self._plan, named, family, mapped, coded, quantized, resident, streamed)
        try:
            plan = make(slots * senders)
        except ManifestError:
            if senders == 1:
                raise
            plan = make(slots)  # a row of blocks is larger than such a chunk
        if not streamed:
            self._plans[way] = (signature, plan)
        return plan

    def _plan(
        self,
        named: Named,
        family: str | None,
        mapped: list[bool],
        coded: Collection[int],
        quantized: dict[str, WeightFormat],
        resident: list[bool],
        streamed: bool,
        slots: int,
    ) -> TransferPlan:
        return TransferPlan(
            sources_for(named, family, self.layout),
            mapped,
            self.layout["bucket_bytes"] // slots // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT,
            quantized,
            [index for index, is_resident in enumerate(resident) if is_resident],
            streamed,
            slots,
            coded,
            format_of_codes(self.layout).name,
        )

    def share(
        self,
        ranks: Ranks,
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
            message = self._in_place.message(plan)
            if message["name"] not in ranks.known:
                ranks.ask(message)
        if not plan.streamed and not any(plan.spans):
            if self._users <= {*users}:  # another engine may have the bucket open
                self._free_bucket()  # every rank let go of it before it answered
            return None
        bucket = self._bucket_on(device, plan.manifest.bucket_bytes)
        previous, self._bucket = self._bucket, bucket
        bucket.share(ranks)
        if previous is not None and previous is not bucket:
            previous.close()  # every rank let go of it as it opened the new one
        if self._packer is None or self._packer[:2] != (plan, bucket):
            dtype = getattr(torch, self.layout["dtype"])
            self._packer = plan, bucket, packer_on(device, plan, bucket.content, dtype)
        return self._packer[2]

    @property
    def reads_shards(self) -> bool:
        """Whether the plan that was asked for last maps shards of several ranks."""
        return self._in_place.has_shards

    @property
    def opened(self) -> tuple[str, ...]:
        """Seeds of the shards and codes that ``share`` had engines open."""
        return self._in_place.seeds

    def content(self, plan: TransferPlan, chunk: int) -> Content:
        """What the bucket holds of a chunk, for ranks that do not share its memory."""
        assert self._bucket is not None
        offset, size = plan.extent(chunk)
        return Content(offset, self._bucket.content[offset : offset + size])

    def _free_bucket(self) -> None:
        self._packer = None
        bucket, self._bucket = self._bucket, None  # engines that are told at once may both be here
        if bucket is not None:
            bucket.close()

    def _bucket_on(self, device: torch.device | None, nbytes: int) -> Bucket:
        place = torch.device("cpu") if device is None else device
        kept = self._bucket
        if kept is None or kept.content.device != place or kept.content.numel() != nbytes:
            return bucket_on(device, nbytes, self.layout["is_remote"])
        return kept
