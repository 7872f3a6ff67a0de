"""What a trainer updates from: a model whose tensors are all at hand, or a stream of them."""

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import ManifestError
from trainer_bridge import hf_names
from trainer_bridge.announcement import Announcement
from trainer_bridge.clock import Clock
from trainer_bridge.collective import Leader
from trainer_bridge.engine_connection import EngineConnection
from trainer_bridge.fsdp import Named, NamedTensors, named_tensors
from trainer_bridge.layout import sources_for
from trainer_bridge.transfer_plan import TransferPlan
from trainer_bridge.update_session import UpdateSession


class Weights(Protocol):
    """The weights of one update."""

    named: Named
    """All tensors, or none of a stream."""

    def plan(
        self,
        connection: EngineConnection,
        kv_scales: torch.Tensor | None,
        device: torch.device | None,
    ) -> TransferPlan:
        """What the leader sends, and how."""

    def send(
        self,
        leader: Leader,
        session: UpdateSession | None,
        layout: dict[str, Any],
        kv_scales: torch.Tensor | None,
        clock: Clock,
    ) -> None:
        """Gather every tensor on all ranks, in one order; the leader lays them into the bucket."""

    def exhaust(self) -> None:
        """Take part in what is left of the collectives: other ranks wait for them."""


class WholeModel:
    """A module, a mapping or a list: planned once, and read in place where nothing moves."""

    def __init__(self, model_or_named_tensors: nn.Module | NamedTensors) -> None:
        self._family = None
        if isinstance(model_or_named_tensors, nn.Module):
            self._family = hf_names.model_type(model_or_named_tensors)
        self.named = named_tensors(model_or_named_tensors)

    def plan(
        self,
        connection: EngineConnection,
        kv_scales: torch.Tensor | None,
        device: torch.device | None,
    ) -> TransferPlan:
        return connection.plan(self._with(kv_scales), self._family, device)

    def send(
        self,
        leader: Leader,
        session: UpdateSession | None,
        layout: dict[str, Any],
        kv_scales: torch.Tensor | None,
        clock: Clock,
    ) -> None:
        plan = None if session is None else session.plan
        named = self._with(kv_scales)
        planned = sources_for(named, self._family, layout) if plan is None else plan.sources
        for index, (source, (_, tensor)) in enumerate(zip(planned, named, strict=True)):
            if plan is not None and plan.mapped[index]:
                continue
            whole = source.read(tensor)
            clock.lap("read")
            leader.attempt(UpdateSession.put, session, index, whole)
            clock.lap("write")

    def exhaust(self) -> None:
        """A failure reaches every rank before the next tensor."""

    def _with(self, kv_scales: torch.Tensor | None) -> Named:
        return self.named if kv_scales is None else [*self.named, (KV_SCALES, kv_scales)]


class Stream:
    """An iterator of (HF name, whole tensor): walked once, and no tensor is kept.

    A tensor is read before the next one is asked for, so the iterator may reuse its memory. A GPU
    reads it in its turn on the current stream, on which the iterator must write too, or wait.
    """

    def __init__(
        self, tensors: Iterator[tuple[str, torch.Tensor]], announcement: Announcement | None
    ) -> None:
        self.named: Named = []
        self._tensors, self._announcement = tensors, announcement

    def plan(
        self,
        connection: EngineConnection,
        kv_scales: torch.Tensor | None,
        device: torch.device | None,
    ) -> TransferPlan:
        return connection.stream_plan(self._announcement, kv_scales, device)

    def send(
        self,
        leader: Leader,
        session: UpdateSession | None,
        layout: dict[str, Any],
        kv_scales: torch.Tensor | None,
        clock: Clock,
    ) -> None:
        for name, tensor in self._tensors:
            if isinstance(tensor, DTensor):
                if leader.is_alone and tensor.device_mesh.size() > 1:
                    raise ManifestError(
                        f"{name} is sharded over {tensor.device_mesh.size()} ranks; pass group=, "
                        f"the process group of the ranks that stream together"
                    )
                tensor = tensor.full_tensor()
            clock.lap("read")
            leader.attempt(UpdateSession.put_named, session, name, tensor)
            clock.lap("write")
        if kv_scales is not None:
            leader.attempt(UpdateSession.put_named, session, KV_SCALES, kv_scales)
        leader.attempt(UpdateSession.end_stream, session)

    def exhaust(self) -> None:
        for _ in self._tensors:
            pass
