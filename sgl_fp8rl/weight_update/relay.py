"""Forwards the messages of a trainer on another host, which come over TCP, to every rank.

The bytes of a chunk follow its message. They are written once, into memory that all ranks read as
they read the memory of a trainer on their own host. Where this process has kept the trainer's last
update, changes of its chunks follow instead. They are all here before a rank writes the first
chunk, so where they are torn, nothing was written.
"""

import logging
import socket
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from threading import Condition, Lock, Thread
from typing import Any

import torch

from sgl_fp8rl.protocol import framing
from sgl_fp8rl.protocol.host_memory import HostMemory
from sgl_fp8rl.protocol.image import DeltaError
from sgl_fp8rl.protocol.values import excerpt
from sgl_fp8rl.weight_update.rank_server import accept
from sgl_fp8rl.weight_update.relay_image import Memories, SessionImage

logger = logging.getLogger(__name__)


CHANGED = "changed chunk"
"""A chunk that ranks are told of when all changes are here."""
SLOTS = 2
"""Of a bucket in host memory: so many chunks are written or filled at once."""
PROBES = 3
"""TCP keep-alive probes after which the connection to a silent host is closed."""


class Relay:
    """Forwards the messages of one session, and keeps its bucket open until the next session.

    Args:
        host: the address to listen at.
        silence_s: seconds that the trainer may send nothing during an update.

    Raises:
        OSError: this address cannot be listened at.
    """

    def __init__(self, host: str, silence_s: float, memories: Memories) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        self._silence_s, self._memories = silence_s, memories
        self._memory: HostMemory | None = None
        self._ranks: list[socket.socket] = []
        self._sending = Lock()
        self._asked: deque[str] = deque()
        """What ranks have still to answer, in order."""
        self._image = SessionImage(memories)
        self._writing = 0
        """Changed chunks that ranks are writing; -1 after one that they could not write."""
        self._written = Condition()

    def start(self, sockets: Sequence[str], token: str) -> None:
        """Wait for the trainer, in two threads of this process.

        Args:
            sockets: of the ranks, whose session has begun.
        """
        run = partial(self._run, list(sockets), token)
        Thread(target=run, name="fp8rl-relay", daemon=True).start()

    def close(self) -> None:
        """Stop listening: there is no session."""
        self._listener.close()

    def _run(self, sockets: list[str], token: str) -> None:
        with ExitStack() as stack:
            try:
                with self._listener:
                    peer = stack.enter_context(accept(self._listener, token))
                peer.settimeout(self._silence_s)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _notice_its_death(peer, self._silence_s)
                known = self._connect(stack, sockets, token)
                out = stack.enter_context(peer.dup())  # its timeout is its own
                out.settimeout(self._silence_s)
                framing.send(out, {"ok": True, "known": known, **self._image.told})
            except (OSError, ValueError) as error:
                logger.warning("no trainer on another host connected: %s", str(error))
                return
            answers = Thread(target=self._pass_answers, args=(out,), daemon=True)
            answers.start()
            try:
                while True:
                    self._pass_message(peer)
            except OSError as error:
                if peer.gettimeout() is not None:  # in the middle of an update
                    logger.warning("the trainer on another host is gone: %s", str(error))
            except ValueError as error:
                self._send(peer, {"replies": [{"error": str(error)}]})
            except Exception as error:  # whatever it is, the trainer and the ranks must be told
                logger.exception("an update over the network failed")
                self._send(peer, {"replies": [{"error": f"the engine's relay failed: {error}"}]})
            for rank in self._ranks:
                with suppress(OSError):
                    rank.shutdown(socket.SHUT_WR)
            answers.join()

    def _connect(self, stack: ExitStack, sockets: list[str], token: str) -> list[str]:
        """Connect to every rank; the names of what all of them and this process have open."""
        kept = dict(self._memories.by_name.items())  # none of them goes meanwhile
        common = set(kept)
        for path in sockets:
            rank = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            rank.connect(path)
            framing.send(rank, {"token": token})
            reply, _ = framing.receive(rank)
            common &= set(reply.get("known", ()))
            self._ranks.append(rank)
        for name in common:
            self._memory = kept[name]
        return sorted(common)

    def _pass_message(self, peer: socket.socket) -> None:
        """Forward the trainer's next message to every rank.

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
            content = self._place(message.pop("offset", None), message.pop("bytes", None))
            if "change" in message:
                self._take_change(peer, message, content)
                return
            _receive(peer, content)
            self._image.keep(message.get("index"), content)
        elif op == "finish":
            self._write_changed()
        elif op == "commit":
            name = message.pop("image", "")
            self._image.name = name if isinstance(name, str) else ""
        if op == "wait":  # without a reply
            self._tell(message)
        else:
            self._ask(message, fds)

    def _take_change(
        self, peer: socket.socket, message: dict[str, Any], content: torch.Tensor
    ) -> None:
        """Receive what changes in a chunk. The ranks, which write it later, hear of the trainer.

        Args:
            content: where the chunk will lie.
        """
        offset, size = int(content.storage_offset()), content.numel()
        change = self._image.room_for(message.get("index"), message["change"], offset, size)
        _receive(peer, change)
        self._ask({"op": "staged"})

    def _ask(self, message: dict[str, Any], fds: tuple[int, ...] = (), op: str = "") -> None:
        """Send a message to every rank.

        Args:
            op: what its replies are to, by default its own.
        """
        self._asked.append(op or str(message.get("op")))
        self._tell(message, fds)

    def _tell(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        for rank in self._ranks:
            with suppress(OSError):  # it ended the session, and has said why
                framing.send(rank, message, fds)

    def _pass_answers(self, out: socket.socket) -> None:
        """Forward the ranks' replies to the trainer, in one message."""
        with suppress(OSError):  # a rank hangs up when the session is over, and so do we
            while True:
                replies = [framing.receive(rank)[0] for rank in self._ranks]
                failed = any("error" in reply for reply in replies)
                op = self._asked.popleft() if self._asked else ""
                if op == CHANGED:
                    with self._written:
                        self._writing = -1 if failed else self._writing - 1
                        self._written.notify()
                    if not failed:
                        self._send(out, {"progress": True})
                        continue
                if op == "commit" and not failed:
                    self._keep_image()
                self._send(out, {"replies": replies})
        with self._written:
            self._writing = -1
            self._written.notify()
        with suppress(OSError):
            out.shutdown(socket.SHUT_WR)

    def _keep_image(self) -> None:
        try:
            self._image.commit()
        except (RuntimeError, MemoryError, DeltaError):  # the next update is sent whole
            logger.exception("what the engine was sent is not kept")

    def _send(self, peer: socket.socket, answer: dict[str, Any]) -> None:
        with self._sending, suppress(OSError):
            framing.send(peer, answer)

    def _made(self, message: dict[str, Any]) -> HostMemory:
        name, size = message.get("name"), message.get("bytes")
        if not isinstance(name, str) or type(size) is not int:
            raise ValueError(f"a bucket is {excerpt(size)} bytes; install one sgl-fp8rl")
        if not 0 < size <= self._memories.most_bytes:
            raise ValueError(
                f"a bucket is {size} bytes, but the engine's is {self._memories.most_bytes}; "
                f"install one sgl-fp8rl"
            )
        memory = self._memories.by_name[name] = HostMemory(size)
        return memory

    def _place(self, offset: Any, size: Any) -> torch.Tensor:
        if self._memory is None:
            raise ValueError("a chunk came before its bucket; open the bucket first")
        room = self._memory.content.numel()
        if [type(offset), type(size)] != [int, int] or not 0 <= offset <= offset + size <= room:
            raise ValueError(f"a chunk lies at {excerpt(offset)}, outside of its bucket")
        return self._memory.content[offset : offset + size]

    def _write_changed(self) -> None:
        """Have every rank write the chunks that changed, two at a time."""
        for index, offset, size in self._image.places():
            with self._written:
                self._written.wait_for(lambda: self._writing < SLOTS, self._silence_s)
                if not 0 <= self._writing < SLOTS:
                    return  # the trainer is told why, or a rank hangs and it gives up
                self._writing += 1
            self._image.write(index, self._place(offset, size))
            self._ask({"op": "chunk", "index": index}, op=CHANGED)


def _receive(peer: socket.socket, content: torch.Tensor) -> None:
    """Fill ``content`` with the next bytes.

    Raises:
        OSError: the connection ended.
    """
    view = content.numpy().data
    while view:
        received = peer.recv_into(view)
        if not received:
            raise ConnectionError("the connection ended in the middle of a chunk")
        view = view[received:]


def _notice_its_death(peer: socket.socket, silence_s: float) -> None:
    """Have the kernel end a connection whose other host is gone, also between updates."""
    seconds = max(round(silence_s / PROBES), 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, seconds),
        (socket.TCP_KEEPINTVL, seconds),
        (socket.TCP_KEEPCNT, PROBES),
    ):
        peer.setsockopt(socket.IPPROTO_TCP, option, value)
