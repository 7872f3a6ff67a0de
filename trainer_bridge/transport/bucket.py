"""Memory that a trainer fills and every rank of an engine reads, wherever it lies."""

from collections.abc import Callable
from typing import Protocol

import torch

from trainer_bridge.transport.cuda_ipc import DeviceBucket, StagingBucket
from trainer_bridge.transport.host_memory import HostBucket
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
