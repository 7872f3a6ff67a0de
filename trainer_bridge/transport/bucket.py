"""Memory that a trainer fills and every rank of an engine reads, wherever it lies."""

import secrets
import weakref
from typing import Any

import torch

from sgl_fp8rl.protocol.cuda_memory import CudaMemoryError, DeviceMemory
from sgl_fp8rl.protocol.host_memory import HostMemory
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.transport.rank_client import EngineRanks, Engines, UnreachableMemoryError


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
