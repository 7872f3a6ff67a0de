"""A rank's private socket: between begin and commit its main thread serves the trainer here.

One round trip a bucket and no scheduler message. The socket is 0600 in a 0700 folder and its peer
must be the same user. Whatever goes wrong ends the session; it never ends the server.
"""

import logging
import mmap
import os
import shutil
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sgl_fp8rl.weight_update import wire
from sgl_fp8rl.weight_update.apply import Rows
from sgl_fp8rl.weight_update.session import Session, SessionError

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0


@dataclass
class Outcome:
    """How the session ended on one rank."""

    committed: bool
    reason: str
    dirty: bool


class RankSocket:
    """Listens for the one trainer of one session."""

    def __init__(self, rank: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="fp8rl-"))
        self.path = self._folder / f"rank{rank}.sock"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(str(self.path))
            self.path.chmod(0o600)
            self._listener.listen(1)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def accept(self, token: str, silence_s: float) -> socket.socket:
        """Wait for the trainer that holds the session's token; others are turned away.

        Raises:
            TimeoutError: it did not come.
        """
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            # one deadline for all: peers that are turned away must not hold the engine
            self._listener.settimeout(max(deadline - time.monotonic(), 1e-3))
            peer, _ = self._listener.accept()
            try:
                peer.settimeout(CONNECT_TIMEOUT_S)
                hello, fds = wire.receive(peer)
                for fd in fds:
                    os.close(fd)
                if wire.peer_uid(peer) == os.getuid() and hello.get("token") == token:
                    peer.settimeout(silence_s)
                    wire.send(peer, {"ok": True})
                    return peer
                wire.send(peer, {"error": "this socket serves another session"})
            except (wire.WireError, ValueError, OSError) as error:
                logger.warning("a peer of the update socket was turned away: %s", error)
            peer.close()


def serve(
    rank_socket: RankSocket, session: Session, token: str, silence_s: float
) -> tuple[Outcome, socket.socket | None]:
    """Serve one session until it is ready to commit, is aborted, or its trainer is gone.

    Returns:
        the outcome on this rank, and the trainer's connection where it still waits for the reply
        to ``commit`` or ``abort``: the caller answers after all ranks agreed, and closes it.
    """
    bucket = Bucket()
    peer = None
    try:
        peer = rank_socket.accept(token, silence_s)
        while True:
            message, fds = wire.receive(peer)
            op = message.get("op")
            try:
                if op not in ("commit", "abort"):
                    _handle(op, message, fds, session, bucket)
            finally:
                for fd in fds:
                    os.close(fd)
            if op == "commit":
                return Outcome(session.finished, "commit came before finish", session.dirty), peer
            if op == "abort":
                return Outcome(False, str(message.get("reason", "aborted")), session.dirty), peer
            wire.send(peer, {"ok": True})
    except TimeoutError:
        reason = f"the trainer was silent for {silence_s:.0f} s" if peer else "no trainer connected"
    except ConnectionError as error:
        reason = f"the trainer is gone: {error}"
    except wire.FAULTS as error:
        reason = f"a step of the update failed with {type(error).__name__}: {error}"
        if isinstance(error, SessionError | ValueError):
            reason = str(error)
        logger.exception("update to version %d failed", session.manifest.version)
        # now, not after the ranks agreed: the others wait for the trainer to hear of it
        reply(peer, {"error": reason})
        return Outcome(False, reason, session.dirty), None
    finally:
        bucket.close()
    if peer is not None:
        peer.close()
    return Outcome(False, reason, session.dirty), None


def reply(peer: socket.socket | None, message: dict[str, Any]) -> None:
    """Tell the trainer how the session ended, if it is still there, and hang up."""
    if peer is None:
        return
    try:
        wire.send(peer, message)
    except OSError as error:
        logger.warning("the trainer left before it heard %s (%s)", message, error)
    finally:
        peer.close()


def _handle(
    op: Any, message: dict[str, Any], fds: list[int], session: Session, bucket: "Bucket"
) -> None:
    if op == "bucket":
        bucket.open(fds, int(message["bytes"]))
    elif op == "part":
        for entry in message["tensors"]:
            name, offset, rows = entry["name"], int(entry["offset"]), _rows(entry)
            spec = session.manifest.tensors.get(name)
            if spec is None:
                raise SessionError(f"{name} is not in the manifest; announce each tensor at begin")
            shape = (rows[1] - rows[0], *spec.shape[1:]) if spec.shape else ()
            session.write(name, bucket.tensor(offset, spec.dtype, shape), rows)
    elif op == "finish":
        session.finish()
    else:
        raise SessionError(f"an update has no step {op!r}; install one sgl-fp8rl on both sides")


def _rows(entry: dict[str, Any]) -> Rows:
    start, stop = entry["rows"]
    return int(start), int(stop)


class Bucket:
    """The trainer's shared memory, mapped once for the session."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._bytes: torch.Tensor | None = None

    def open(self, fds: list[int], size: int) -> None:
        """Map the memory behind the one descriptor that came; the map keeps its own."""
        if len(fds) != 1 or self._map is not None:
            raise SessionError("an update opens one bucket, with one descriptor")
        actual = os.fstat(fds[0]).st_size
        if not 0 < size <= actual:
            raise SessionError(f"the bucket is {actual} bytes but was announced as {size}")
        self._map = mmap.mmap(fds[0], size, access=mmap.ACCESS_WRITE)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor that lies at this byte offset."""
        if self._bytes is None:
            raise SessionError("a part came before the bucket; open the bucket first")
        stop = offset + torch.Size(shape).numel() * dtype.itemsize
        if offset % dtype.itemsize or not 0 <= offset < stop <= self._bytes.numel():
            raise SessionError(f"a part at bytes {offset}:{stop} lies outside of the bucket")
        return self._bytes[offset:stop].view(dtype).view(shape)

    def close(self) -> None:
        """Let go of the memory; it is unmapped when the last tensor in it is gone."""
        self._bytes = self._map = None
