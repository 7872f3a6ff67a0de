"""One update of the engines of one layout: what is put into their bucket, and the vote."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sgl_fp8rl.protocol.manifest import ManifestError, twice, wrong_names
from trainer_bridge.engines.engine_client import EngineError, check_fields
from trainer_bridge.session.participant import Participant
from trainer_bridge.sources.announcement import as_announced
from trainer_bridge.sources.parameters import Named, check_readable
from trainer_bridge.sources.tied_head import StreamedHead
from trainer_bridge.transfer.packer import QuantizePacker
from trainer_bridge.transfer.transfer_plan import TransferPlan, is_aligned
from trainer_bridge.transport.rank_client import Engines
from trainer_bridge.ways.carriers import Chunks
from trainer_bridge.ways.sender import Sender


def slowest_gpu(replies: list[dict[str, Any]]) -> float | None:
    """Seconds of the slowest GPU in the ranks' replies to ``finish``; None on a CPU."""
    seconds: list[Any] = [reply.get("gpu_seconds") for reply in replies]
    for reply, each in zip(replies, seconds, strict=True):
        sound = each is None or (type(each) in (int, float) and 0 <= each < float("inf"))
        check_fields("a rank's reply", reply, {"gpu_seconds": sound})
    return None if None in seconds else max(seconds, default=None)


class UpdateSession:
    """What the engines of one layout are sent, by one plan and from one bucket.

    Args:
        lose: called with an engine that failed; it raises where the update cannot go on without.
    """

    def __init__(
        self,
        members: list[Participant],
        sender: Sender,
        plan: TransferPlan,
        device: torch.device | None,
        lose: Callable[[Participant, EngineError], None],
    ) -> None:
        self.members, self.sender, self.plan, self.device = members, sender, plan, device
        self.carrier = sender.carrier(device)
        self._engines = Engines(members, lose)
        filled = partial(sender.content, plan)
        self.chunks = Chunks(plan, self._engines, filled, self.carrier.content)
        self._came: dict[int, None] = {}
        """What a stream has brought, in its order."""
        self._passed_over: set[str] = set()
        self._head = StreamedHead(sender.layout["tied"], getattr(torch, sender.layout["dtype"]))
        self.network_bytes_of_others = 0
        """Bytes of chunks that other ranks of the trainer sent to engines on other hosts."""

    def open(self) -> None:
        """Have the engines open the memory that they will read."""
        opening = self._engines.open
        if not opening:
            return
        self.sender.join(self)  # an engine that is lost meanwhile must not free what others read
        connections = [member.connection for member, _ in opening]
        self.carrier.begin(self.plan, [(m.connection, ranks) for m, ranks in opening])
        packer = self.sender.share(self._engines, self.plan, self.device, {self, *connections})
        self.chunks.packer = packer
        for member, _ in self._engines.open:
            member.connection.use(self.sender)
        if packer is not None:
            packer.begin()

    @property
    def network_bytes(self) -> int:
        """Bytes of chunks that engines on other hosts were sent."""
        mine = sum(ranks.network_bytes for ranks in self._engines.ranks)
        return mine + self.network_bytes_of_others

    def put_named(self, name: str, tensor: torch.Tensor) -> None:
        """Put the next tensor of a stream into the bucket."""
        check_readable(name, tensor)
        if not self._engines.open:
            return
        plan = self.plan
        if name not in plan.views:
            self._pass_over(name, tensor)
            return
        index, _ = plan.views[name]
        if index in self._came:
            raise ManifestError(twice(name))
        if plan.mapped[index]:
            return
        source = plan.sources[index]
        # as the packer will read it
        whole = as_announced(name, tensor, source.held_as, source.shape)
        self._head.take(name, whole)
        self._came[index] = None
        if plan.streamed:
            self.chunks.order += plan.add(index)
        self.put(index, whole)
        self.chunks.own(index)

    def _pass_over(self, name: str, tensor: torch.Tensor) -> None:
        if name not in self.sender.ignored:
            raise ManifestError(wrong_names(unknown=[name]))
        if name in self._passed_over:
            raise ManifestError(twice(name))
        self._passed_over.add(name)
        self._head.take(name, tensor)

    def end_stream(self) -> None:
        """Check that the stream was complete.

        Raises:
            ManifestError: a tensor of the last stream is missing, where the engine checks the
                first; or the head of a tied model came, and is not the embedding.
        """
        self._head.check()
        missing = [
            source.cuts[0][0]
            for index, source in enumerate(self.plan.sources)
            if source.cuts and index not in self._came
        ]
        if missing and self._engines.open and not self.plan.streamed:
            raise ManifestError(wrong_names(missing=missing))

    def pack_in_place(self, named: Named) -> bool:
        """Put all parameters into the bucket where each is the trainer's own memory on its GPU.

        Returns:
            whether they were; otherwise nothing was done.
        """
        packer = self.chunks.packer
        if not isinstance(packer, QuantizePacker) or not self.plan.is_resident:
            return False
        packer.pack_in_place([tensor for _, tensor in named])
        self.chunks.flush()
        return True

    def put(self, index: int, whole: torch.Tensor) -> None:
        """Put a parameter into the bucket once it is its turn; full slots are sent on the way."""
        if not self._engines.open:
            return
        if self.device is not None:
            whole = whole.to(self.device)
            whole = whole if is_aligned(whole) else whole.clone()
        self.chunks.put(index, whole)

    def send_rest(self) -> None:
        """Send what is left, and wait until it is read."""
        if not self._engines.open:
            return
        self.chunks.flush()
        self.chunks.await_read()

    def finish(self) -> float | None:
        """Send what is left, and have every rank check that nothing is missing.

        Returns:
            seconds that the slowest GPU took to write, or None on a CPU.
        """
        self.send_rest()
        if not self._engines.open:
            return None
        if self.chunks.packer is not None:
            self.chunks.packer.finish()
        return slowest_gpu(self._engines.ask({"op": "finish"}))

    def committed(self) -> None:
        """Plan the next stream as this one came, unless it came as planned, and send the next
        update as changes of this one where engines have kept it."""
        self.carrier.committed()
        came = list(self._came)
        if came and (self.plan.streamed or came != sorted(came)):
            self.sender.remember_stream(self.plan, came)
        self._came.clear()

    def close(self) -> None:
        """End, once; memory that no engine has open is freed."""
        self.chunks.close()
        self.carrier.close()
        if self._came:  # it failed, perhaps for what was held of it in the order of the last one
            self.sender.forget_stream()
        self.sender.leave(self)
