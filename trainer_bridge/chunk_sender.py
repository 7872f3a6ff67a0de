"""The chunks of one update on their way to its engines, in flight as many as there are slots."""

from typing import Any

import torch

from sgl_fp8rl.protocol.image import Steps
from trainer_bridge.image_changes import sent_as
from trainer_bridge.lookahead import Lookahead
from trainer_bridge.sender import Sender
from trainer_bridge.session_engines import SessionEngines
from trainer_bridge.session_images import SessionImages
from trainer_bridge.transfer_plan import TransferPlan
from trainer_bridge.transport.rank_client import Content

Message = dict[str, Any]


class SessionChunks:
    """Sends chunks that are filled, and says when a slot is free for the next one.

    Args:
        device: the trainer's GPU, or None where it has none that the engines can read.
    """

    def __init__(
        self,
        engines: SessionEngines,
        sender: Sender,
        plan: TransferPlan,
        device: torch.device | None,
        images: SessionImages,
    ) -> None:
        self._engines, self._sender, self._plan = engines, sender, plan
        self._device, self._images = device, images
        self.order: list[str] = []
        """Tensors of a stream that the engines are told of with the next chunk."""
        self._in_flight = 0
        """Chunks that the engines are reading."""
        self._senders = 1
        """Ranks of the trainer that send chunks in turn; this one sends the first."""
        self._ahead = Lookahead[tuple[Message, Content | None]]()

    def send_every(self, senders: int) -> None:
        """From now on other ranks of the trainer send chunks, all in turn."""
        self._senders = senders

    def await_slot(self, chunk: int) -> bool:
        """Wait until a chunk may be filled; False where this rank does not fill it."""
        if not self._is_mine(chunk):
            return False
        self._await_engine()
        return bool(self._engines.open)  # or the bucket may be gone

    def send(self, chunk: int) -> None:
        """Send a chunk that is filled."""
        if not self._is_mine(chunk):
            return
        if self._device is not None and not self._sender.layout["is_remote"]:
            torch.cuda.current_stream(self._device).synchronize()  # the slot is filled
        order = {"order": self.order} if self._plan.streamed else {}
        message = {"op": "chunk", "index": chunk, **order}
        self.order = []
        for ready in self._ahead.push(self._filled(message, chunk)):
            self._send_filled(*ready)

    def finish(self) -> None:
        """Send what the GPU is still at work on, and wait until all is read."""
        for ready in self._ahead.drain():
            self._send_filled(*ready)
        while self._in_flight:
            self._wait_chunk()

    def close(self) -> None:
        """End, once."""
        del self._ahead  # it refers to here: a cycle would keep the bucket

    def _is_mine(self, chunk: int) -> bool:
        return chunk % self._senders == 0

    def _filled(self, message: Message, chunk: int) -> Steps[tuple[Message, Content | None]]:
        """A message and what it is about, for engines that do not read the bucket."""
        if not self._sender.layout["is_remote"] or not self._engines.open:
            return message, None
        content = self._sender.content(self._plan, chunk)
        held = [ranks.image for _, ranks in self._engines.open]
        return message, (yield from sent_as(self._images.changes, chunk, content, held))

    def _send_filled(self, message: Message, content: Content | None) -> None:
        self._await_engine()
        for _, ranks in self._engines.open:
            ranks.send_chunk(message, content)
        self._in_flight += 1

    def _await_engine(self) -> None:
        """Wait until engines have read so much that a slot is free."""
        while self._in_flight >= self._plan.manifest.slots // self._senders:
            self._wait_chunk()

    def _wait_chunk(self) -> None:
        self._engines.wait()
        self._in_flight -= 1
