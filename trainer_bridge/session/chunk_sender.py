"""Sends the chunks of one update, or every so many-th of them, in flight as many as have slots."""

from collections.abc import Callable
from typing import Any, Protocol

from sgl_fp8rl.protocol.image import Steps
from trainer_bridge.lookahead import Lookahead
from trainer_bridge.transfer.transfer_plan import TransferPlan
from trainer_bridge.transport.rank_client import Content, EngineRanks

Message = dict[str, Any]


class Readers(Protocol):
    """The engines that chunks are sent to."""

    @property
    def ranks(self) -> list[EngineRanks]:
        """Those of each engine that is still in the update."""

    def wait(self) -> object:
        """Wait for the next reply of each. What becomes of an engine that has none, and of the
        update, is decided here."""


class ChunkSender:
    """Sends chunks that are filled, and says when a slot is free for the next one.

    Args:
        content: what a chunk holds, for engines that keep these images and do not read the bucket;
            None where they read it.
        number, senders: the place of this rank among those of the trainer that send in turn.
    """

    def __init__(
        self,
        plan: TransferPlan,
        readers: Readers,
        content: Callable[[int, list[str | None]], Steps[Content | None]],
        number: int = 0,
        senders: int = 1,
    ) -> None:
        self._plan, self._readers, self._content = plan, readers, content
        self._number, self.senders = number, senders
        self._in_flight = 0
        """Chunks that the engines are reading."""
        self._ahead = Lookahead[tuple[Message, Content | None]]()

    def await_slot(self, chunk: int) -> bool:
        """Wait until a chunk may be filled; False where this rank does not fill it."""
        if not self._is_mine(chunk):
            return False
        self._await_engine()
        return bool(self._readers.ranks)  # or the bucket may be gone

    def send(self, chunk: int, **more: Any) -> None:
        """Send a chunk that is filled, with more in its message."""
        if not self._is_mine(chunk) or not self._readers.ranks:
            return
        for ready in self._ahead.push(self._filled({"op": "chunk", "index": chunk, **more})):
            self._send_filled(*ready)

    def finish(self) -> None:
        """Send what the GPU is still at work on."""
        for ready in self._ahead.drain():
            self._send_filled(*ready)

    def await_read(self) -> None:
        """Wait until all is read."""
        while self._in_flight:
            self._wait()

    def close(self) -> None:
        """End, once."""
        del self._ahead, self._content  # they refer to here: a cycle would keep the bucket

    def _is_mine(self, chunk: int) -> bool:
        return chunk % self.senders == self._number

    def _filled(self, message: Message) -> Steps[tuple[Message, Content | None]]:
        held = [ranks.image for ranks in self._readers.ranks]
        return message, (yield from self._content(message["index"], held))

    def _send_filled(self, message: Message, content: Content | None) -> None:
        self._await_engine()
        for ranks in self._readers.ranks:
            ranks.send_chunk(message, content)
        self._in_flight += 1

    def _await_engine(self) -> None:
        """Wait until engines have read so much that a slot is free."""
        while self._in_flight >= self._plan.manifest.slots // self.senders:
            self._wait()

    def _wait(self) -> None:
        self._in_flight -= 1
        self._readers.wait()
