"""The bucket: memory that a trainer fills chunk by chunk, however parameters come, and every rank
of an engine reads, wherever it lies."""

import secrets
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch

from sgl_fp8rl.formats import by_tensor
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.protocol.cuda_memory import CudaMemoryError, DeviceMemory, gpu_uuid
from sgl_fp8rl.protocol.manifest import SLOTS
from sgl_fp8rl.protocol.place import HostMemory
from sgl_fp8rl.protocol.snapshot import Steps
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.transfer.packer import Packer
from trainer_bridge.transfer.transfer_plan import TransferPlan
from trainer_bridge.transport.rank_client import (
    Content,
    EngineRanks,
    Engines,
    UnreachableMemoryError,
)

T = TypeVar("T")
Message = dict[str, Any]
assert SLOTS >= 2


class Bucket:
    """Memory of ``nbytes``. The engine's side of it is ``receiver.writers.shared_memory.Bucket``.

    A rank on this host opens a GPU's by its handle, and host memory by its descriptor, which is
    passed over the rank's socket. For one on another host, its relay makes memory of this size.

    Args:
        device: the GPU of this process, by default host memory.
        is_opened: ranks on this host open it.

    Raises:
        EngineError: there is not enough memory.
        UnreachableMemoryError: this system does not share the GPU's.
    """

    def __init__(
        self, nbytes: int, device: torch.device | None = None, is_opened: bool = True
    ) -> None:
        # not the handle: another process may be given the same one
        self.name = secrets.token_hex(16)
        """By which ranks know it."""
        self._message: dict[str, Any] = {"op": "bucket", "name": self.name, "bytes": nbytes}
        self._fds: tuple[int, ...] = ()
        self.close: Any
        """Free the memory; ranks have let go of it before."""
        try:
            if device is None:
                self._host = HostMemory(nbytes)  # which frees its memory as it goes
                self.content, self.close = self._host.content, self._host.close
                self._fds = (self._host.fd,)
                return
            memory = DeviceMemory(nbytes, device.index)
        except (OSError, CudaMemoryError) as error:
            raise EngineError(f"a bucket of {nbytes} bytes could not be made: {error}") from error
        self.content = memory.tensor
        """uint8: what ranks read."""
        self.close = weakref.finalize(self, memory.close)
        self.close.atexit = False  # not before the engine has let go; the driver frees it anyway
        if is_opened:
            try:
                handle = memory.handle().to_json()
            except CudaMemoryError as error:
                raise UnreachableMemoryError(str(error)) from error
            self._message = {"op": "bucket", "name": self.name, "handle": handle}

    def share(self, ranks: EngineRanks | Engines[Any]) -> None:
        """Have every rank open it, in the place of an older one, unless all have."""
        if self.name not in ranks.known:
            ranks.ask(self._message, self._fds)


class Carrier:
    """The bucket that the engines of one layout read, and what it holds for them. On this host they
    open it: device memory of the trainer, or host memory for engines on a CPU, for trainers without
    a GPU, and for those whose GPU memory the engine cannot open.

    Args:
        device: the trainer's GPU, or None where it has none that the engines can read.
    """

    is_far = False
    """Whether engines are sent what is in the bucket."""

    def __init__(self, layout: dict[str, Any], device: torch.device | None) -> None:
        self._layout, self.device = layout, device

    @property
    def slots(self) -> int:
        """Of the bucket, of which one is filled while the engine writes another; 1 of their size
        together where one GPU would fill and write, which takes turns between processes."""
        if self.device is None or self.device.type != "cuda":
            return SLOTS
        try:
            return 1 if {gpu_uuid(self.device.index)} == set(self._layout["gpus"]) else SLOTS
        except CudaMemoryError:
            return SLOTS  # whoever shares this GPU's memory will say what is wrong with it

    def senders(self, ranks: int) -> int:
        """How many of so many ranks send together: each has slots of its own."""
        return 1

    @property
    def quantized(self) -> dict[str, WeightFormat]:
        """HF tensors that are quantized on the way, since the engines keep them so. Without a GPU
        engines do it, unless weights would have gone through one of the trainer's."""
        if self.device is None and not self._layout["through_host"]:
            return {}
        return by_tensor(self._layout["formats"])

    def begin(self, plan: TransferPlan, engines: Sequence[tuple[Any, EngineRanks]]) -> None:
        """Get ready for an update of these engines; what is kept of each, and its ranks."""

    def content(self, chunk: int, data: Content, held: list[str | None]) -> Steps[Content | None]:
        """A chunk that is filled, as it is sent; None where engines read it in the bucket."""
        if self.device is not None:
            torch.cuda.current_stream(self.device).synchronize()  # the slot is filled
        return None
        yield

    @property
    def bases(self) -> tuple[str, str]:
        """Those that changes are of, and that they make; empty where there are none."""
        return "", ""

    def committed(self) -> None:
        """Engines have what was sent."""

    def close(self) -> None:
        """The update is over, however it ended."""


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
        chunk, held = message["index"], [ranks.snapshot for ranks in self._engines.ranks]
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
