"""One walk over the chunks of an update: they are filled, however parameters come, and sent."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

from sgl_fp8rl.protocol.image import Steps
from sgl_fp8rl.protocol.manifest import SLOTS
from trainer_bridge.transfer.packer import Packer
from trainer_bridge.transfer.transfer_plan import TransferPlan
from trainer_bridge.transport.rank_client import Content, Engines

T = TypeVar("T")
Message = dict[str, Any]
assert SLOTS >= 2


class Lookahead(Generic[T]):
    """Work on chunks in their order, a few steps ahead of its results.

    What is to be done with a chunk is a generator. It yields where it has queued something on the
    GPU and would wait for it, and returns the result. While one waits, the next chunks are filled:
    on the same stream, and each in another slot, so what is queued within two steps reads a slot
    before it is filled again.
    """

    def __init__(self) -> None:
        self._steps: deque[Steps[T]] = deque()
        self._results: dict[Steps[T], T] = {}

    def push(self, steps: Steps[T]) -> Iterator[T]:
        """Begin with one more, and go on with the others by a step; what is done comes out."""
        self._steps.append(steps)
        yield from self._advance()

    def drain(self) -> Iterator[T]:
        """The rest."""
        while self._steps:
            yield from self._advance()

    def _advance(self) -> Iterator[T]:
        for steps in reversed(self._steps):  # what waits least comes first: it queues work
            if steps not in self._results:
                try:
                    next(steps)
                except StopIteration as end:
                    self._results[steps] = end.value
        while self._steps and self._steps[0] in self._results:
            yield self._results.pop(self._steps.popleft())


class Chunks:
    """The chunks of a plan, in flight as many as have slots.

    Args:
        filled: what the bucket holds of a chunk.
        content: a filled chunk as it is sent to engines that hold these bases; None where they read
            the bucket.
        packer: fills them; None where all is read in place.
        number, senders: the place of this rank among those of the trainer that each fill and send
            every so many-th chunk.
    """

    def __init__(
        self,
        plan: TransferPlan,
        engines: Engines[Any],
        filled: Callable[[int], Content],
        content: Callable[[int, Content, list[str | None]], Steps[Content | None]],
        packer: Packer | None = None,
        number: int = 0,
        senders: int = 1,
    ) -> None:
        self._plan, self._engines, self.packer = plan, engines, packer
        self._filled, self._content = filled, content
        self._number, self.senders = number, senders
        self.order: list[str] = []
        """Tensors of a stream that the engines are told of with the next chunk."""
        self._chunk = self._turn = 0
        self._held: dict[int, torch.Tensor] = {}
        self._in_flight = 0
        """Chunks that the engines are reading."""
        self._ahead = Lookahead[tuple[Message, Content | None]]()

    def put(self, index: int, whole: torch.Tensor) -> None:
        """Put a parameter in once it is its turn; full chunks are sent on the way."""
        if not self._plan.sources[index].cuts:
            return  # nothing of it is sent
        self._held[index] = whole
        turns = self._plan.turns
        while self._turn < len(turns) and turns[self._turn][1] in self._held:
            chunk, source = turns[self._turn]
            self._end_before(chunk)
            if self._await_slot(chunk):
                assert self.packer is not None
                self.packer.put(source, self._held[source], chunk)
            self._turn += 1
            if self._turn > self._plan.last_turns[source]:
                del self._held[source]

    def own(self, index: int) -> None:
        """Copy a parameter whose turn has not come: its memory may be written again."""
        held = self._held.get(index)
        if held is not None:
            self._held[index] = held.clone()

    def flush(self) -> None:
        """Send the last chunk, those that nothing is put into, and what the GPU is at work on."""
        self._end_before(len(self._plan.chunks))
        for ready in self._ahead.drain():
            self._send(*ready)

    def await_read(self) -> None:
        """Wait until all is read."""
        while self._in_flight:
            self._wait()

    def close(self) -> None:
        """End, once."""
        # they refer to here, a cycle that would keep the bucket, or hold the trainer's tensors
        del self._ahead, self._held, self.packer

    def _end_before(self, chunk: int) -> None:
        while self._chunk < chunk:
            if self.packer is not None and self._await_slot(self._chunk):
                self.packer.complete(self._chunk)
            self._end(self._chunk)
            self._chunk += 1

    def _end(self, chunk: int) -> None:
        message: Message = {"op": "chunk", "index": chunk}
        if self._plan.streamed:
            message["order"], self.order = self.order, []
        if self._is_mine(chunk) and self._engines.ranks:
            for ready in self._ahead.push(self._ready(message)):
                self._send(*ready)

    def _ready(self, message: Message) -> Steps[tuple[Message, Content | None]]:
        chunk, held = message["index"], [ranks.image for ranks in self._engines.ranks]
        return message, (yield from self._content(chunk, self._filled(chunk), held))

    def _send(self, message: Message, content: Content | None) -> None:
        self._await_engine()
        for ranks in self._engines.ranks:
            ranks.send_chunk(message, content)
        self._in_flight += 1

    def _is_mine(self, chunk: int) -> bool:
        return chunk % self.senders == self._number

    def _await_slot(self, chunk: int) -> bool:
        """Wait until a chunk may be filled; False where this rank does not fill it."""
        if not self._is_mine(chunk):
            return False
        self._await_engine()
        return bool(self._engines.ranks)  # or the bucket may be gone

    def _await_engine(self) -> None:
        """Wait until engines have read so much that a slot is free."""
        while self._in_flight >= self._plan.manifest.slots // self.senders:
            self._wait()

    def _wait(self) -> None:
        self._in_flight -= 1
        self._engines.wait()
