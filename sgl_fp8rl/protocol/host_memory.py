"""Anonymous host memory that another process opens by its descriptor.

It has no name, so nothing is left behind when a process dies. It is sealed against shrinking, which
would fault a process that reads it.
"""

import fcntl
import mmap
import os
import weakref

import torch


class HostMemory:
    """``nbytes`` of memory; OSError if there is not enough."""

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("fp8rl-bucket", os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.content = torch.frombuffer(mmap.mmap(self.fd, nbytes), dtype=torch.uint8)
        except (OSError, ValueError) as error:
            os.close(self.fd)
            raise OSError(f"{nbytes} bytes could not be allocated: {error}") from error
        self.close = weakref.finalize(self, os.close, self.fd)
        """Release it here; processes that have it open keep it."""
