"""Messages to engines that have begun an update and wait for the others."""

from collections.abc import Sequence
from threading import Event, Thread
from types import TracebackType

from trainer_bridge.participant import Participant

KEEP_ALIVE_S = 10.0
"""Seconds between two messages: engines give a trainer up that is silent for
``--fp8rl-session-timeout-s``, 300 by default."""


class KeepAlive:
    """While it is open, each engine that has begun hears of its trainer.

    The message has no reply, so one of them that hangs neither delays the others nor has a reply
    to give later.

    Args:
        members: the engines of the update.
    """

    def __init__(self, members: Sequence[Participant]) -> None:
        self._members, self._over = members, Event()
        self._thread: Thread | None = None

    def __enter__(self) -> None:
        if len(self._members) > 1:
            self._thread = Thread(target=self._run, name="fp8rl-keep-alive", daemon=True)
            self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(KEEP_ALIVE_S):
            for ranks in [member.ranks for member in self._members]:
                if ranks is not None:
                    ranks.send({"op": "wait"})
