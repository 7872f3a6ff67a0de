"""A relay's TCP port: who shows the session's token comes in, and who is silent holds up nobody."""

import errno
import socket
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread

from sgl_fp8rl.receiver.rank_server import holds

MOST_STRANGERS = 64
"""Connections that may not have shown the token yet. Trainers show it at once, so the oldest makes
way for the next one."""
NO_ROOM_S = 0.1
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""The process or the system has no file descriptor or memory for a peer now."""


class Door:
    """Listens at this address, at a port of the kernel's choice; OSError if it cannot."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        self._strangers: OrderedDict[socket.socket, None] = OrderedDict()
        """Oldest first."""
        self._lock = Lock()

    def open(self, token: str, admit: Callable[[socket.socket], None]) -> None:
        """Let peers in from now on.

        Args:
            admit: called with each that shows the token, in a thread of its own; it closes it.
        """
        run = Thread(target=self._run, args=(token, admit), name="fp8rl-relay-door", daemon=True)
        run.start()

    def shut(self) -> None:
        """Let nobody in any more."""
        with suppress(OSError):  # not closed: the thread that waits would wait at another socket
            self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening: it was never opened."""
        self._listener.close()

    def _run(self, token: str, admit: Callable[[socket.socket], None]) -> None:
        with self._listener, suppress(OSError):  # it is shut
            while True:
                try:
                    peer, _ = self._listener.accept()
                except ConnectionError:  # it left before
                    continue
                except OSError as error:
                    if error.errno not in _NO_ROOM:
                        raise
                    time.sleep(NO_ROOM_S)
                    continue
                with self._lock:
                    self._strangers[peer] = None
                    if len(self._strangers) > MOST_STRANGERS:
                        oldest, _ = self._strangers.popitem(last=False)
                        with suppress(OSError):  # its thread closes it
                            oldest.shutdown(socket.SHUT_RDWR)
                Thread(target=self._ask, args=(peer, token, admit), daemon=True).start()

    def _ask(self, peer: socket.socket, token: str, admit: Callable[[socket.socket], None]) -> None:
        is_known = holds(peer, token)
        with self._lock:
            is_here = peer in self._strangers
            self._strangers.pop(peer, None)
        if is_known and is_here:
            admit(peer)
        else:
            peer.close()
