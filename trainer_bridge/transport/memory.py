"""A bucket of plain memory, shared with every rank of an engine on this host.

The bucket is anonymous memory whose descriptor is passed over each rank's socket: it has no name,
so nothing is left behind when a process dies. Its two halves take turns: one is filled while the
ranks apply the other.
"""

import mmap
import os
import socket
from collections import deque
from typing import Any

import torch

from sgl_fp8rl.weight_update import wire
from trainer_bridge.engine_client import EngineError

ALIGNMENT = 64
"""Bytes; every tensor in the bucket starts at a multiple of it."""
SOCKET_TIMEOUT_S = 600.0
"""Seconds that a rank may take over one half of the bucket."""


def half_bytes(bucket_bytes: int) -> int:
    """Bytes of one half: the most that one part can carry."""
    return bucket_bytes // 2 // ALIGNMENT * ALIGNMENT


class MemoryTransport:
    """Carries parts to all ranks of one engine for one session.

    Raises:
        EngineError: a rank refused a part, or is gone.
    """

    def __init__(self, paths: list[str], token: str, bucket_bytes: int) -> None:
        self._ranks: list[socket.socket] = []
        self._unanswered: deque[int] = deque()
        self.part_bytes = half_bytes(bucket_bytes)
        try:
            for path in paths:
                self._ranks.append(_connect(path, token))
            self._bytes = self._share_bucket(2 * self.part_bytes)
        except EngineError:
            self.close()  # or ranks that did connect would wait for what never comes
            raise
        self._half = 0
        self._fill = 0
        self._entries: list[dict[str, Any]] = []

    def put(self, name: str, tensor: torch.Tensor, rows: tuple[int, int]) -> None:
        """Copy rows of a tensor into the bucket; full halves are sent on the way."""
        size = tensor.numel() * tensor.element_size()
        if self._fill + size > self.part_bytes:
            self._send_part()
        offset = self._half * self.part_bytes + self._fill
        target = self._bytes[offset : offset + size].view(tensor.dtype).view(tensor.shape)
        target.copy_(tensor)
        self._entries.append({"name": name, "offset": offset, "rows": list(rows)})
        self._fill += -(-size // ALIGNMENT) * ALIGNMENT

    def finish(self) -> None:
        """Send what is left, and have every rank hold that nothing is missing."""
        self._send_part()
        while self._unanswered:
            self._wait_part()
        self._ask({"op": "finish"})

    def commit(self) -> None:
        """Make the new version the one that generates, on all ranks or on none."""
        self._ask({"op": "commit"})

    def abort(self, reason: str) -> None:
        """End the session without a commit; ranks that are gone already are passed over."""
        for rank in self._ranks:
            try:
                wire.send(rank, {"op": "abort", "reason": reason})
            except OSError:
                continue  # that rank has ended the session itself

    def close(self) -> None:
        """Hang up; a session that was not committed ends with it."""
        for rank in self._ranks:
            rank.close()

    def _share_bucket(self, size: int) -> torch.Tensor:
        fd = os.memfd_create("fp8rl-bucket")
        try:
            os.ftruncate(fd, size)
            shared = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
            self._send({"op": "bucket", "bytes": size}, (fd,))
        except OSError as error:
            raise EngineError(f"no bucket of {size} bytes could be shared ({error})") from error
        finally:
            os.close(fd)
        self._wait()
        return shared

    def _send_part(self) -> None:
        if not self._entries:
            return
        if len(self._unanswered) == 1:
            self._wait_part()  # the other half must be free before it is filled
        self._send({"op": "part", "tensors": self._entries})
        self._unanswered.append(self._half)
        self._entries, self._fill, self._half = [], 0, 1 - self._half

    def _wait_part(self) -> None:
        self._wait()
        self._unanswered.popleft()

    def _ask(self, message: dict[str, Any]) -> None:
        self._send(message)
        self._wait()

    def _send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        for rank in self._ranks:
            try:
                wire.send(rank, message, fds)
            except OSError:
                continue  # it ended the session; its last reply says why

    def _wait(self) -> None:
        for rank in self._ranks:
            try:
                reply, _ = wire.receive(rank)
            except OSError as error:
                raise EngineError(
                    f"the engine ended the update ({error}); see its log for the reason"
                ) from error
            if "error" in reply:
                raise EngineError(reply["error"])


def _connect(path: str, token: str) -> socket.socket:
    rank = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    rank.settimeout(SOCKET_TIMEOUT_S)
    try:
        rank.connect(path)
        wire.send(rank, {"token": token})
        reply, _ = wire.receive(rank)
    except OSError as error:
        rank.close()
        raise EngineError(
            f"the engine's update socket cannot be reached ({error}); trainer and engine must run "
            f"on one host, as the same user"
        ) from error
    if "error" in reply:
        rank.close()
        raise EngineError(reply["error"])
    return rank
