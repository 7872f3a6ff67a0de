"""A rank's private socket: between begin and commit its main thread serves the trainer here.

One round trip a bucket and no scheduler message. The socket is 0600 in a 0700 folder and its peer
must be the same user. Whatever goes wrong ends the session; it never ends the server.
"""

import hmac
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_fp8rl.protocol import framing
from sgl_fp8rl.protocol.cuda_memory import CudaMemoryError
from sgl_fp8rl.protocol.values import excerpt
from sgl_fp8rl.receiver.session import Session, SessionError
from sgl_fp8rl.receiver.writers.shared_memory import UnreachableMemoryError

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0
HELLO_TIMEOUT_S = 10.0
"""Seconds that a peer has to send its token; the next one waits meanwhile at a rank's socket."""
LONGEST_HELLO = 4096
"""Bytes that are read of a peer that has not shown its token."""
LONGEST_NAME = 64
"""Characters of the name of a transaction or of a snapshot."""
LONGEST_REASON = 1000
"""Characters of the reason of a failure that are kept: each request is refused with it."""


@dataclass
class Outcome:
    """How the session ended on one rank."""

    committed: bool
    """Whether the trainer sent the commit, and everything was written."""
    reason: str
    dirty: bool
    """Whether the engine can no longer serve the version before, as it is."""
    voted: bool = False
    """Whether everything was written when the trainer was lost: it may have committed elsewhere."""
    can_roll_back: bool = False
    """Whether all that was written can be undone, and nobody needs it."""


def committed(outcomes: Sequence[Outcome]) -> bool:
    """Whether an update committed: one rank received the commit, and all others had voted.

    A trainer sends it after every rank has voted, so it stands where the trainer dies meanwhile.
    """
    return any(o.committed for o in outcomes) and all(o.committed or o.voted for o in outcomes)


def last_activity(path: str) -> float:
    """When the trainer last sent a message to a rank's socket, as ``time.time``; 0 where it is
    closed. Other processes can read it; the rank's main thread is busy with the trainer.
    """
    try:
        return Path(path).stat().st_mtime
    except OSError:
        return 0.0


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

    def heard(self) -> None:
        """Note that the trainer has sent a message, for ``last_activity``."""
        with suppress(OSError):  # something cleaned the temporary folder; /health fails later
            os.utime(self.path)

    def close(self) -> None:
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def accept(
        self, token: str, silence_s: float, known: list[str], snapshot: str = ""
    ) -> socket.socket:
        """Wait for the trainer that holds the session's token; others are turned away.

        Args:
            known: names of the shared memory that is open already, reported to the trainer.
            snapshot: the name of the update that this rank holds, and that changes may be of.

        Raises:
            OSError: it did not come, or left at once.
        """
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        # one deadline for all: peers that are turned away must not hold the engine
        while (left := deadline - time.monotonic()) > 0:
            self._listener.settimeout(left)
            peer, _ = self._listener.accept()
            with ExitStack() as closing:
                closing.enter_context(peer)
                if holds(peer, token, left):
                    peer.settimeout(silence_s)
                    held = {"snapshot": snapshot} if snapshot else {}
                    framing.send(peer, {"ok": True, "known": known, **held})
                    closing.pop_all()
                    return peer
        raise TimeoutError("no trainer connected in time")


def holds(peer: socket.socket, token: str, limit_s: float = HELLO_TIMEOUT_S) -> bool:
    """Whether a peer shows a session's token, in time; if not, it is told."""
    try:
        peer.settimeout(min(limit_s, HELLO_TIMEOUT_S))
        if _holds(peer, token):
            return True
        framing.send(peer, {"error": "this socket serves another session"})
    except (framing.FramingError, ValueError, OSError) as error:
        logger.warning("a peer was refused at the update's socket: %s", error)
    return False


def _holds(peer: socket.socket, token: str) -> bool:
    """Whether a peer sends this token; nothing of another user of this host is parsed."""
    if peer.family == socket.AF_UNIX and framing.peer_uid(peer) != os.getuid():
        return False
    hello, fds = framing.receive(peer, LONGEST_HELLO)
    for fd in fds:
        os.close(fd)
    said = hello.get("token")
    return isinstance(said, str) and hmac.compare_digest(said.encode(), token.encode())


def serve(
    rank_socket: RankSocket, session: Session, token: str, silence_s: float, num_engines: int = 1
) -> tuple[Outcome, socket.socket | None]:
    """Serve one session until it is ready to commit, is aborted, or its trainer is gone.

    Args:
        num_engines: how many engines the trainer updates together. If there are others, a rank that
            does not learn their outcome does not go back to the version before.

    Returns:
        the outcome on this rank, and the trainer's connection where it still waits for the reply
        to ``commit`` or ``abort``: the caller answers after all ranks agreed, and closes it.
    """
    peer = None
    try:
        known = session.weights.memory.known()
        peer = rank_socket.accept(token, silence_s, known, session.base)
        while True:
            message, fds = framing.receive(peer)
            rank_socket.heard()
            op = message.get("op")
            try:
                # "wait": the trainer has nothing to write yet, is there, and awaits no reply
                if op not in ("commit", "abort", "wait"):
                    done = {"ok": True, **_handle(op, message, fds, session)}
                    # a trainer that has hung up may have said why: that is read next
                    with suppress(ConnectionError):
                        framing.send(peer, done)
            finally:
                for fd in fds:
                    os.close(fd)
            if op == "commit":
                session.weights.memory.set_owner(peer)
                session.snapshot = _name(message.get("snapshot"))
                return Outcome(session.finished, "commit came before finish", session.dirty), peer
            if op == "abort":
                reason = message.get("reason")
                reason = _clean(reason) if isinstance(reason, str) else "aborted"
                if message.get("fence") is True:
                    return Outcome(False, reason, True), peer
                return Outcome(False, reason, session.dirty, can_roll_back=session.can_undo), peer
    except TimeoutError:
        reason = f"the trainer was silent for {silence_s:.0f} s" if peer else "no trainer connected"
    except ConnectionError as error:
        reason = f"the trainer is gone: {error}"
    except Exception as error:  # whatever it is, it ends the update and not the server
        reason = f"a step of the update failed with {type(error).__name__}: {error}"
        if isinstance(error, SessionError | CudaMemoryError | ValueError):
            reason = _clean(str(error))
        logger.exception("update to %s failed", session.policy)
        retry = framing.RETRY_ON_HOST if isinstance(error, UnreachableMemoryError) else {}
        # now, not after the ranks agreed: the others wait until the trainer knows
        reply(peer, {"error": reason, **retry})
        # the trainer cannot say any more whether others go on; it tries again where memory fails
        if num_engines > 1 and not retry:
            return Outcome(False, reason, True), None
        return Outcome(False, reason, session.dirty, can_roll_back=session.can_undo), None
    if peer is None:  # nobody came: nothing was sent to this rank
        return Outcome(False, reason, session.dirty), None
    peer.close()
    if num_engines > 1 or session.finished:
        dirty = session.dirty or num_engines > 1
        return Outcome(False, reason, dirty, session.finished), None
    return Outcome(False, reason, session.dirty, can_roll_back=session.can_undo), None


def _name(snapshot: Any) -> str:
    """What a trainer calls an update that it may send changes of; empty where it will not."""
    return snapshot if isinstance(snapshot, str) and len(snapshot) <= LONGEST_NAME else ""


def _clean(reason: str) -> str:
    """A reason of a length, and of characters, that can be repeated in every refusal."""
    return reason[:LONGEST_REASON].encode(errors="replace").decode()


def reply(peer: socket.socket | None, message: dict[str, Any]) -> None:
    """Report to the trainer how the session ended, if it is still there, and close."""
    if peer is None:
        return
    try:
        framing.send(peer, message)
    except OSError as error:
        logger.warning("the trainer disconnected before it received %s (%s)", message, error)
    finally:
        peer.close()


def _handle(op: Any, message: dict[str, Any], fds: list[int], session: Session) -> dict[str, Any]:
    if op == "chunk":
        if "order" in message:
            session.extend(message["order"])
        session.write(message.get("index"))
    elif op == "change":
        session.change(message.get("index"), message.get("bytes"))
    elif op == "finish":
        return {"gpu_seconds": session.finish()}
    elif op == "staged":  # a relay has received what it will have written later
        return {}
    elif op == "bucket":
        session.weights.memory.open_bucket(message, fds)
    elif op == "segments":
        session.weights.memory.open_segments(message)
    else:
        raise SessionError(
            f"an update has no step {excerpt(op)}; install the same sgl-fp8rl on both sides"
        )
    return {}
