"""The ranks of an engine on another host, through a connection to its relay."""

import logging
import select
import socket
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any

import torch

from sgl_fp8rl.protocol import framing
from sgl_fp8rl.protocol.nixl_memory import NixlError, Writer, writer_to
from sgl_fp8rl.protocol.values import are_names
from trainer_bridge.engines.engine_client import EngineError, check_fields
from trainer_bridge.transport.rank_client import (
    Content,
    EngineRanks,
    SlowEngineError,
    check,
    receive,
)

logger = logging.getLogger(__name__)

FLUSH_S = 1.0
"""Seconds that what was sent last has to leave, before the connection is closed."""


Parcel = tuple[dict[str, Any], torch.Tensor | None, Writer | None]
"""A message, the bytes that follow it, and what brings them before the message instead."""


class RelayClient(EngineRanks):
    """The ranks of an engine on another host: what is in the bucket is sent with each chunk.

    A thread sends, so that the trainer's ranks, which gather in lockstep, go on meanwhile.

    Args:
        where: the relay's port, and the host that the engine listens at.
        host: by which this process reaches the engine, where it knows; else the engine's own.
        connect_s: seconds that the connection may take, by default as many.
    """

    def __init__(
        self,
        where: Any,
        token: Any,
        host: str | None,
        timeout_s: float,
        connect_s: float | None = None,
    ) -> None:
        super().__init__(timeout_s)
        self._end: Callable[[], object] | None = None
        sound = {
            "relay": isinstance(where, dict)
            and type(where.get("port")) is int
            and isinstance(where.get("host"), str),
            "token": isinstance(token, str),
        }
        check_fields("a session of the engine", {"relay": where, "token": token}, sound)
        address = host or where["host"], where["port"]
        self.where = {"host": address[0], "port": address[1]}
        """Where other ranks of the trainer reach it, with ``token``."""
        self.token = token
        try:
            relay = socket.create_connection(address, connect_s or timeout_s)
        except (OSError, ValueError) as error:  # ValueError: no valid name
            raise EngineError(
                f"the engine's relay at {address[0]}:{address[1]} cannot be reached ({error}); "
                f"open the engine's ports to this host, and start it with --host"
            ) from error
        self._sockets = [relay]
        relay.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            framing.send(relay, {"token": token})
            hello: Any = receive(relay)
            known, snapshot = hello.get("known"), hello.get("snapshot")
            most = hello.get("snapshot_bytes", 0)
            sound = {"known": are_names(known), "snapshot": isinstance(snapshot, str | None)}
            sound["snapshot_bytes"] = type(most) is int
            check_fields("the engine's relay", hello, sound)
        except OSError as error:
            self.close()
            raise EngineError(f"the engine's relay hung up ({error}); see its log") from error
        except EngineError:
            self.close()
            raise
        self.known, self.snapshot, self.snapshot_bytes = set(known), snapshot, most
        self._writer: Writer | None = None
        self._find_writer(hello)
        self._parcels: SimpleQueue[Parcel | None] = SimpleQueue()
        out = relay.dup()  # its timeout is its own
        out.settimeout(timeout_s)
        sender = Thread(target=_send_all, args=(self._parcels, out, timeout_s), daemon=True)
        sender.start()
        # the thread does not hold this
        self._end = weakref.finalize(self, _end, self._parcels, sender, out)

    def send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        if message["op"] == "commit":
            message = {**message, "snapshot": self.next_snapshot}
        self._parcels.put((message, None, None))  # the relay opens memory of its own

    def send_chunk(self, message: dict[str, Any], content: Content | None) -> None:
        assert content is not None
        offset, data, before, change = content
        message = {**message, "offset": offset, "bytes": data.numel()}
        writer = self._writer
        if before and before == self.snapshot and change is not None:
            data, writer = change.payload, None
            message["change"] = data.numel()
        if writer is not None:
            message["written"] = True
        self.network_bytes += data.numel()
        self._parcels.put((message, data, writer))

    def wait(self, began: float | None = None) -> list[dict[str, Any]]:
        (relay,) = self._sockets
        try:
            while "progress" in (answer := self._next_reply(relay, began)):
                began = None  # a chunk is written: the next one has as long again
        except SlowEngineError:
            self._give_up()
            raise
        self._find_writer(answer)
        replies: Any = answer.get("replies")
        is_sound = isinstance(replies, list) and all(isinstance(each, dict) for each in replies)
        check_fields("the engine's relay", answer, {"replies": is_sound})
        for reply in replies:
            check(reply)
        return replies  # type: ignore[no-any-return]

    def close(self) -> None:
        if self._end is not None:  # it was connected
            self._end()
            self._writer = None
        super().close()

    def _find_writer(self, answer: dict[str, Any]) -> None:
        """Write chunks by NIXL where the engine offers it; else they follow their messages, which
        is slower and no reason to stop a run."""
        if "exposed" not in answer:
            return
        try:
            self._writer = writer_to(answer["exposed"])
        except NixlError as error:
            self._writer = None
            _warn(str(error))

    def _give_up(self) -> None:
        """After a timeout: what is still to be said would wait for as long again."""
        for relay in self._sockets:
            with suppress(OSError):
                relay.shutdown(socket.SHUT_RDWR)


def _end(parcels: "SimpleQueue[Parcel | None]", sender: Thread, out: socket.socket) -> None:
    """End the thread, before the interpreter ends: torch aborts a process one of whose threads lets
    go of a tensor after that. What is still to be said after ``FLUSH_S`` is not."""
    parcels.put(None)
    if sender is current_thread():  # which may collect garbage
        return
    sender.join(FLUSH_S)
    if sender.is_alive():
        with suppress(OSError):  # the network stalls
            out.shutdown(socket.SHUT_RDWR)
        sender.join(FLUSH_S)


@cache
def _warn(why: str) -> None:
    logger.warning("chunks go to engines on other hosts over TCP, which is slower: %s", why)


def _is_shut(relay: socket.socket) -> bool:
    """Whether either end has hung up."""
    poll = select.poll()
    poll.register(relay, select.POLLRDHUP)
    return bool(poll.poll(0))


def _send_all(
    parcels: "SimpleQueue[Parcel | None]", relay: socket.socket, timeout_s: float
) -> None:
    """Send what comes, until there is no more; nothing behind what could not be sent: the next
    reply, or that none comes, says why."""
    with relay:
        is_open = True
        while (parcel := parcels.get()) is not None:
            if is_open:
                is_open = _send(parcel, relay, timeout_s)


def _send(parcel: Parcel, relay: socket.socket, timeout_s: float) -> bool:
    """Whether it could be sent."""
    message, data, writer = parcel
    try:
        if data is not None and writer is not None:
            writer.write(data, message["offset"], timeout_s, lambda: _is_shut(relay))
        framing.send(relay, message)
        if data is not None and writer is None:
            relay.sendall(data.numpy().data)
    except OSError:
        return False
    except NixlError as error:
        logger.error("an update over the network ends: %s", str(error))
        with suppress(OSError):  # both ends learn that nothing comes any more
            relay.shutdown(socket.SHUT_RDWR)
        return False
    return True
