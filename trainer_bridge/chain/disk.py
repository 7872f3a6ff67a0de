"""What a chain needs of a folder: files that are whole or not there, and one publisher at work."""

import fcntl
import os
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

from trainer_bridge.ranks.rank_values import exchanged

LOCK = ".lock"


@exchanged
class ChainError(RuntimeError):
    """A chain cannot be written or read; the last good version stays what it is."""


def brief(error: Exception | None) -> str:
    """The type and the beginning of an error that may have anything in its text."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"


def delete_all_but(folder: Path, names: Collection[str]) -> None:
    """Delete the files of versions, but for these: what is old, or of a process that was killed."""
    for path in folder.glob("*.safetensors.zst*"):
        if path.name not in names:
            path.unlink(missing_ok=True)


def replace(path: Path, content: bytes) -> None:
    """Write a file such that no crash leaves a part of it under its name."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def lock(folder: Path) -> BinaryIO:
    """Keep other publishers out of a folder, until the file that is returned is closed.

    Raises:
        ChainError: one is at work.
    """
    file = (folder / LOCK).open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ChainError(
            f"another process publishes in {folder}; end it, or use another"
        ) from error
    except OSError:  # a file system without locks
        pass
    return file
