"""Forwards the messages of a trainer on another host, which come over TCP, to every rank.

The bytes of a chunk follow its message, or the trainer has written them by NIXL before. They are
written once, into memory that all ranks read as they read the memory of a trainer on their own
host. Where all ranks hold the trainer's last update, changes of its chunks follow instead. They are
all here before a rank writes the first chunk, so where they are torn, nothing was written. The
trainer's first rank leads; others may send chunks of their own, each over a connection of its own.
"""

import logging
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Condition, Lock, Thread
from typing import Any

import torch

from sgl_fp8rl.protocol import framing
from sgl_fp8rl.protocol.manifest import SLOTS
from sgl_fp8rl.protocol.place import HostMemory
from sgl_fp8rl.protocol.values import excerpt
from sgl_fp8rl.receiver import rank_server
from sgl_fp8rl.receiver.relay.changes import SessionChanges
from sgl_fp8rl.receiver.relay.door import Door
from sgl_fp8rl.receiver.relay.memory import RelayMemory
from sgl_fp8rl.receiver.relay.ranks import RelayRanks

logger = logging.getLogger(__name__)


CHANGED = "changed chunk"
"""A chunk that ranks are told of when all changes are here."""
PROBES = 3
"""TCP keep-alive probes after which the connection to a silent host is closed."""


class Relay:
    """Forwards the messages of one session, and keeps its bucket open until the next session.

    Args:
        host: as of ``Door``.
        silence_s: seconds that the trainer may send nothing during an update.
    """

    def __init__(self, host: str, silence_s: float, memories: RelayMemory) -> None:
        self._door = Door(host)
        self.port = self._door.port
        self._came: SimpleQueue[socket.socket] = SimpleQueue()
        """The trainer's first rank."""
        self._has_come = False
        self._silence_s, self._memories = silence_s, memories
        self._memory: HostMemory | None = None
        self._ranks = RelayRanks()
        self._senders: list[socket.socket] | None = None
        """Other ranks of the trainer, which send chunks; None unless the engine's ranks answer."""
        self._sending = Lock()
        self._changes = SessionChanges(memories.most_snapshot_bytes)
        self._told: dict[str, Any] = {}
        """What the trainer is told: the update that all ranks hold, and how large one may be."""
        self._writing = 0
        """Changed chunks that ranks are writing; -1 after one that they could not write."""
        self._written = Condition()

    def start(self, sockets: Sequence[str], token: str) -> None:
        """Wait for the trainer, in threads of this process; the ranks' session has begun."""
        self._door.open(token, self._enter)
        run = partial(self._run, list(sockets), token)
        Thread(target=run, name="fp8rl-relay", daemon=True).start()

    def close(self) -> None:
        """Stop listening: there is no session."""
        self._door.close()

    def _enter(self, peer: socket.socket) -> None:
        """A rank of the trainer has come: the first one leads."""
        with self._sending:
            leads, self._has_come = not self._has_come, True
        if leads:
            self._came.put(peer)
        else:
            self._serve_sender(peer)

    def _await_trainer(self) -> socket.socket:
        try:
            return self._came.get(timeout=rank_server.CONNECT_TIMEOUT_S)
        except Empty:
            raise TimeoutError("no trainer connected in time") from None

    def _shut(self) -> None:
        """Let nobody in any more, a trainer that came too late neither."""
        self._door.shut()
        with self._sending:
            self._has_come = True
        while not self._came.empty():
            self._came.get().close()

    def _run(self, sockets: list[str], token: str) -> None:
        with ExitStack() as stack:
            stack.callback(self._shut)
            try:
                peer = stack.enter_context(self._await_trainer())
                peer.settimeout(self._silence_s)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _enable_keepalive(peer, self._silence_s)
                known = self._connect(stack, sockets, token)
                out = stack.enter_context(peer.dup())  # its timeout is its own
                out.settimeout(self._silence_s)
                with self._sending:
                    self._senders = []
                framing.send(out, {"ok": True, "known": known, **self._told, **self._exposed()})
            except (OSError, ValueError) as error:
                logger.warning("no trainer on another host connected: %s", str(error))
                return
            answers = Thread(target=self._pass_answers, args=(out,), daemon=True)
            answers.start()
            try:
                while True:
                    self._pass_message(peer, out)
            except OSError as error:
                if peer.gettimeout() is not None:  # in the middle of an update
                    logger.warning("the trainer on another host is gone: %s", str(error))
            except ValueError as error:
                self._send(peer, {"replies": [{"error": str(error)}]})
            except Exception as error:  # whatever it is, the trainer and the ranks must be told
                logger.exception("an update over the network failed")
                self._send(peer, {"replies": [{"error": f"the engine's relay failed: {error}"}]})
            if peer.gettimeout() is not None:
                self._memories.retire(self._memory)
            self._ranks.hang_up()
            answers.join()

    def _connect(self, stack: ExitStack, sockets: list[str], token: str) -> list[str]:
        """Connect to every rank; the names of what all of them and this process have open."""
        kept = dict(self._memories.by_name.items())  # none of them goes meanwhile
        known, snapshots = self._ranks.connect(stack, sockets, token)
        common = set(kept).intersection(*known)
        for name in common:
            self._memory = kept[name]
        if most := self._memories.most_snapshot_bytes:
            snapshot = snapshots.pop() if len(snapshots) == 1 else ""
            self._told = {"snapshot": snapshot, "snapshot_bytes": most}
        return sorted(common)

    def _serve_sender(self, peer: socket.socket) -> None:
        """Serve another rank of the trainer, until this session commits or ends."""
        with peer:
            with self._sending:
                if self._senders is None:
                    return
                self._senders.append(peer)
            try:
                peer.settimeout(self._silence_s)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                framing.send(peer, {"ok": True, "known": [], **self._told, **self._exposed()})
                while True:
                    self._pass_chunk(peer)
            except OSError:  # it has sent all, or the vote misses what it has not
                pass
            except (ValueError, RuntimeError, MemoryError) as error:
                logger.warning("a chunk of another rank of the trainer is refused: %s", str(error))
                self._send(peer, {"replies": [{"error": str(error)}]})

    def _pass_chunk(self, peer: socket.socket) -> None:
        """Receive the next chunk of a rank that does not lead.

        Raises:
            OSError: it is gone, or silent.
            ValueError: the message is something else.
        """
        message, _ = framing.receive(peer)
        if message.get("op") != "chunk":
            raise ValueError("only the trainer's first rank may send this message")
        self._take_chunk(peer, message, peer)

    def _pass_message(self, peer: socket.socket, out: socket.socket) -> None:
        """Forward the trainer's next message to every rank.

        Args:
            out: where the answers go.

        Raises:
            OSError: it is gone, or silent.
            ValueError: it describes memory that does not exist.
        """
        message, _ = framing.receive(peer)
        op = message.get("op")
        # between updates it has nothing to say
        peer.settimeout(None if op == "commit" else self._silence_s)
        fds: tuple[int, ...] = ()
        if op == "bucket":
            self._memory = self._made(message)
            fds = (self._memory.fd,)
        elif op == "chunk":
            self._take_chunk(peer, message, out)
            return
        elif op == "finish":
            self._write_changed(out)
        elif op == "commit":
            self._door.shut()
            if not self._told:
                message.pop("snapshot", None)
        if op == "wait":  # without a reply
            self._ranks.tell(message)
        else:
            self._ranks.ask(message, out, fds)

    def _take_chunk(self, peer: socket.socket, message: dict[str, Any], out: socket.socket) -> None:
        """Receive a chunk, and have the ranks write it; or what changes in it, which they write
        later."""
        content = self._place(message.pop("offset", None), message.pop("bytes", None))
        if message.pop("written", False) is True:
            if not self._exposed() or "change" in message:
                raise ValueError("a chunk was written into memory that is not exposed")
            self._ranks.ask(message, out)
            return
        if "change" not in message:
            _receive(peer, content)
            self._ranks.ask(message, out)
            return
        index, offset, size = message.get("index"), int(content.storage_offset()), content.numel()
        payload = self._changes.room_for(index, message["change"], size)
        _receive(peer, payload)
        self._changes.take(index, payload, offset, size)  # what is torn is none
        self._ranks.ask({"op": "staged"}, out)  # the ranks hear of the trainer

    def _pass_answers(self, out: socket.socket) -> None:
        """Forward the ranks' replies to who awaits them, in one message.

        Args:
            out: to the rank that leads, which hears of each failure.
        """
        committed = False
        for (op, by), replies in self._ranks.answers(out):
            failed = any("error" in reply for reply in replies)
            committed = committed or (op == "commit" and not failed)
            if op == CHANGED:
                with self._written:
                    self._writing = -1 if failed else self._writing - 1
                    self._written.notify()
                if not failed:
                    self._send(out, {"progress": True})
                    continue
            told = self._exposed() if op == "bucket" else {}
            for to in {by, out} if failed else {by}:
                self._send(to, {"replies": replies, **told})
        # a rank hangs up when the session is over, and so do we
        if not committed:
            self._memories.retire(self._memory)
        with self._written:
            self._writing = -1
            self._written.notify()
        with self._sending:
            senders, self._senders = self._senders or [], None
        for to in (out, *senders):
            with suppress(OSError):
                to.shutdown(socket.SHUT_WR if to is out else socket.SHUT_RDWR)

    def _send(self, peer: socket.socket, answer: dict[str, Any]) -> None:
        with self._sending, suppress(OSError):
            framing.send(peer, answer)

    def _made(self, message: dict[str, Any]) -> HostMemory:
        name, size = message.get("name"), message.get("bytes")
        most = self._memories.most_bytes
        if not isinstance(name, str) or type(size) is not int or not 0 < size <= most:
            raise ValueError(
                f"a bucket is {excerpt(size)} bytes, but the engine's is {most}; install the same "
                f"sgl-fp8rl on both sides"
            )
        return self._memories.make(name, size)

    def _exposed(self) -> dict[str, Any]:
        """What the trainer is told of the bucket, where it may write into it itself."""
        exposed = None if self._memory is None else self._memories.exposed.get(self._memory)
        return {} if exposed is None else {"exposed": exposed.told}

    def _place(self, offset: Any, size: Any) -> torch.Tensor:
        if self._memory is None:
            raise ValueError("a chunk came before its bucket; open the bucket first")
        room = self._memory.content.numel()
        if [type(offset), type(size)] != [int, int] or not 0 <= offset <= offset + size <= room:
            raise ValueError(f"a chunk lies at {excerpt(offset)}, outside of its bucket")
        return self._memory.content[offset : offset + size]

    def _write_changed(self, out: socket.socket) -> None:
        """Have every rank write the chunks that changed, two at a time."""
        for index, offset, (payload, is_delta) in self._changes.in_order():
            with self._written:
                self._written.wait_for(lambda: self._writing < SLOTS, self._silence_s)
                if not 0 <= self._writing < SLOTS:
                    return  # the trainer is told why, or a rank hangs and it gives up
                self._writing += 1
            self._place(offset, payload.numel()).copy_(payload)
            message = {"op": "change", "bytes": payload.numel()} if is_delta else {"op": "chunk"}
            self._ranks.ask({**message, "index": index}, out, op=CHANGED)


def _receive(peer: socket.socket, content: torch.Tensor) -> None:
    """Fill ``content`` with the next bytes; OSError if the connection ends before."""
    view = content.numpy().data
    while view:
        received = peer.recv_into(view)
        if not received:
            raise ConnectionError("the connection ended in the middle of a chunk")
        view = view[received:]


def _enable_keepalive(peer: socket.socket, silence_s: float) -> None:
    """Have the kernel end a connection whose other host is gone, also between updates."""
    seconds = max(round(silence_s / PROBES), 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, seconds),
        (socket.TCP_KEEPINTVL, seconds),
        (socket.TCP_KEEPCNT, PROBES),
    ):
        peer.setsockopt(socket.IPPROTO_TCP, option, value)
