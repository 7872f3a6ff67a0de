"""The bucket: memory that a trainer fills and every rank of an engine reads, wherever it lies."""

import secrets
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sgl_fp8rl.formats import by_tensor
from sgl_fp8rl.formats.weight_format import WeightFormat
from sgl_fp8rl.protocol.cuda_memory import CudaMemoryError, DeviceMemory, gpu_uuid
from sgl_fp8rl.protocol.host_memory import HostMemory
from sgl_fp8rl.protocol.image import Image, Steps
from sgl_fp8rl.protocol.manifest import SLOTS
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.transfer.transfer_plan import TransferPlan
from trainer_bridge.transport.rank_client import (
    Content,
    EngineRanks,
    Engines,
    UnreachableMemoryError,
)


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


@dataclass
class Base:
    """The last update that an engine on another host committed. It outlasts a failure: the engine
    says what it holds."""

    fingerprint: str
    """Of its manifest."""
    image: Image
    has_failed: bool = False
    """Whether the last update of an engine that holds it failed: after a second one the next is
    whole."""


class Holder(Protocol):
    """What is kept of one engine."""

    base: Base | None
    """What it is sent changes of."""


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

    def begin(self, plan: TransferPlan, engines: Sequence[tuple[Holder, EngineRanks]]) -> None:
        """Get ready for an update of these engines."""

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
