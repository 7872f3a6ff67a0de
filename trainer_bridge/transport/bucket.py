"""Memory that a trainer fills and every rank of an engine reads, wherever it lies."""

import secrets
from collections.abc import Callable
from typing import Protocol

import torch

from sgl_fp8rl.protocol.host_memory import HostMemory
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.transport.cuda_ipc import DeviceBucket, StagingBucket
from trainer_bridge.transport.rank_client import Ranks


class Bucket(Protocol):
    """Shared bytes. The engine's side of it is ``weight_update.shared_memory.Bucket``."""

    @property
    def name(self) -> str:
        """By which ranks know it; another bucket has another one."""

    @property
    def content(self) -> torch.Tensor:
        """uint8: what ranks read."""

    @property
    def close(self) -> Callable[[], object]:
        """Frees it; ranks have let go of it before."""

    def share(self, ranks: Ranks) -> None:
        """Have every rank open it, in the place of an older one, unless all have.

        Raises:
            EngineError: a rank cannot.
        """


class HostBucket:
    """Host memory of ``nbytes``: for engines on a CPU, for trainers without a GPU, and for those
    whose GPU memory the engine cannot open.

    Its descriptor is passed over each rank's socket. A rank on another host gets its content
    instead.

    Raises:
        EngineError: there is not enough memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.name = secrets.token_hex(16)
        try:
            self._memory = HostMemory(nbytes)
        except OSError as error:
            raise EngineError(f"a bucket of {nbytes} bytes could not be made: {error}") from error
        self.content, self.close = self._memory.content, self._memory.close

    def share(self, ranks: Ranks) -> None:
        """Have every rank open it, unless all have."""
        if self.name not in ranks.known:
            message = {"op": "bucket", "name": self.name, "bytes": self.content.numel()}
            ranks.ask(message, (self._memory.fd,))


def bucket_on(device: torch.device | None, nbytes: int, is_remote: bool = False) -> Bucket:
    """A new one.

    Args:
        device: the GPU of this process, or None for host memory.
        is_remote: it is for remote engines, which are sent its content.

    Raises:
        EngineError: there is not enough memory.
        UnreachableMemoryError: this system does not share the GPU's.
    """
    if device is None:
        return HostBucket(nbytes)
    return StagingBucket(nbytes, device) if is_remote else DeviceBucket(nbytes, device)
