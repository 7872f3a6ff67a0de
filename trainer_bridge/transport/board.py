"""Counts the chunks that each rank of a trainer has filled, in memory that the ranks share.

Each count has one writer. Ranks are numbered among those that update together; 0 leads.
"""

import fcntl
import mmap
import os
import time
from collections.abc import Callable

import torch

from trainer_bridge.engine_client import EngineError
from trainer_bridge.transport.bucket import Bucket, bucket_on

WAIT_S = 240.0
"""Seconds that a rank may take over a chunk: engines give up after 300."""
SPIN_S, POLL_S = 0.002, 0.0002
FAILED = -1
_ABORTED, _FREE, _FILLED = 0, 1, 2
"""Places of the numbers: whether the update is over, how many chunks have had a free slot so far,
and from here on how many each rank has filled."""
_NAME_BYTES = 32


class Board:
    """A bucket that several ranks fill, and the numbers by which they wait for each other.

    Args:
        memory: uint8, shared: the name of the board, and the numbers.
        bucket: uint8, shared.
        rank: this process.
    """

    def __init__(self, memory: torch.Tensor, bucket: torch.Tensor, rank: int) -> None:
        self._numbers = memory[_NAME_BYTES:].view(torch.int64).numpy()
        self.bucket, self._rank = bucket, rank

    def reset(self) -> None:
        """Begin another update, before the other ranks learn of it."""
        self._numbers[:] = 0

    def abort(self) -> None:
        """End the update: no chunk is sent any more."""
        self._numbers[_ABORTED] = 1

    def allow(self, chunks: int) -> None:
        """Set how many chunks have had a free slot so far."""
        self._numbers[_FREE] = chunks

    def fill(self, chunks: int) -> None:
        """Set how many chunks this rank has filled so far."""
        self._numbers[_FILLED + self._rank] = chunks

    def fail(self) -> None:
        """Record that this rank cannot go on."""
        self.fill(FAILED)

    def await_slot(self, chunk: int) -> bool:
        """Wait until a chunk may be filled; False where the update is over."""
        _wait(lambda: self._numbers[_FREE] > chunk or self._numbers[_ABORTED])
        return not self._numbers[_ABORTED]

    def await_filled(self, chunk: int) -> None:
        """Wait until every rank has filled a chunk.

        Raises:
            EngineError: a rank cannot, or does not in time.
        """
        filled = self._numbers[_FILLED:]
        _wait(lambda: filled.min() > chunk or filled.min() == FAILED)
        if filled.min() == FAILED:
            raise EngineError(
                f"rank {int(filled.argmin())} of the trainer could not write its shard of the "
                f"weights; see its log"
            )


class LeadersBoard(Board):
    """The board of the rank that leads; it makes the memory.

    Args:
        bucket: in host memory.
        ranks: how many update together.

    Raises:
        EngineError: there is not enough memory.
    """

    def __init__(self, bucket: Bucket, ranks: int) -> None:
        self._memory = bucket_on(None, _NAME_BYTES + 8 * (_FILLED + ranks))
        self._memory.content[:_NAME_BYTES] = _as_bytes(self._memory.name)
        super().__init__(self._memory.content, bucket.content, 0)
        self.made_for = bucket, ranks
        assert self._memory.path is not None and bucket.path is not None
        self.address = self._memory.name, self._memory.path, bucket.path
        """By which another process of this host and user opens it."""


def open_board(address: tuple[str, str, str], rank: int) -> Board:
    """Open a board that another rank made.

    Raises:
        OSError: it is on another host, or of another user.
    """
    name, *paths = address
    memory, bucket = map(_mapped, paths)
    if not torch.equal(memory[:_NAME_BYTES], _as_bytes(name)):
        raise FileNotFoundError(f"{paths[0]} is not the memory that was announced")
    return Board(memory, bucket, rank)


def _mapped(path: str) -> torch.Tensor:
    fd = os.open(path, os.O_RDWR)
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # OSError: a file; others may have named it
        return torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)
    finally:
        os.close(fd)


def _as_bytes(name: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(name.encode()), dtype=torch.uint8)


def _wait(condition: Callable[[], object]) -> None:
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        if waited > WAIT_S:
            raise EngineError(
                f"a rank of the trainer was silent for {WAIT_S:.0f} s of an update; see its log"
            )
        time.sleep(0 if waited < SPIN_S else POLL_S)
