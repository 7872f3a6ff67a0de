"""A bucket in host memory: for engines on a CPU, for trainers without a GPU, and for those whose
GPU memory the engine cannot open.

It is anonymous memory whose descriptor is passed over each rank's socket: it has no name, so
nothing is left behind when a process dies. It is sealed against shrinking, which would fault a
rank that reads it.
"""

import fcntl
import mmap
import os
import secrets
import weakref

import torch

from trainer_bridge.engine_client import EngineError
from trainer_bridge.transport.rank_client import Ranks


class HostBucket:
    """Host memory of ``nbytes``, filled by the trainer and read by every rank.

    Raises:
        EngineError: there is not enough memory.
    """

    def __init__(self, nbytes: int) -> None:
        self.name = secrets.token_hex(16)
        self._fd = os.memfd_create("fp8rl-bucket", os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, nbytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.content = torch.frombuffer(mmap.mmap(self._fd, nbytes), dtype=torch.uint8)
        except OSError as error:
            os.close(self._fd)
            raise EngineError(f"no bucket of {nbytes} bytes could be shared ({error})") from error
        self.close = weakref.finalize(self, os.close, self._fd)
        """Let go of the memory; ranks that have it open keep it until they are given another."""

    @property
    def path(self) -> str:
        """Where another process of this host and user can open it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def share(self, ranks: Ranks) -> None:
        """Have every rank open it, unless all have."""
        if self.name not in ranks.known:
            message = {"op": "bucket", "name": self.name, "bytes": self.content.numel()}
            ranks.ask(message, (self._fd,))
