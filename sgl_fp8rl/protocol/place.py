"""Where a process runs, so that another one knows whether they can share memory and sockets; and
host memory that they share.

Not by host name or address: containers of one host share neither temporary folder nor memory, and
two hosts may have the same name.
"""

import fcntl
import mmap
import os
import tempfile
import weakref
from pathlib import Path
from typing import Any

import torch

BOOT = Path("/proc/sys/kernel/random/boot_id")


def here() -> dict[str, Any]:
    """This process's place: the boot of its kernel, and its temporary folder."""
    folder = Path(tempfile.gettempdir())
    status = folder.stat()
    return {
        "boot": _boot(),
        "folder": str(folder),
        "inode": [status.st_dev, status.st_ino],
    }


def is_place(value: Any) -> bool:
    """Whether a peer's message describes a place."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("boot"), str)
        and isinstance(value.get("folder"), str)
        and isinstance(value.get("inode"), list)
        and [type(number) for number in value["inode"]] == [int, int]
    )


def is_reachable(place: dict[str, Any]) -> bool:
    """Whether this process sees the other one's temporary folder, under the same kernel."""
    if place["boot"] != _boot():
        return False
    try:
        status = Path(place["folder"]).stat()
    except (OSError, ValueError):
        return False
    return bool([status.st_dev, status.st_ino] == place["inode"])


def _boot() -> str:
    """Of this kernel; empty where a sandbox hides it, as gVisor may."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""


class HostMemory:
    """``nbytes`` of anonymous memory that another process opens by its descriptor; OSError if there
    is not enough.

    It has no name, so nothing is left behind when a process dies. It is sealed against shrinking,
    which would fault a process that reads it.
    """

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
