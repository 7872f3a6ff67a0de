"""Messages to engines that have begun an update and wait for the others."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import TypeVar

from trainer_bridge.ranks.collective import Leader
from trainer_bridge.session.participant import Participant

T = TypeVar("T")

WAIT_S = 240.0
"""Seconds that a rank may take over its part of an update."""
KEEP_ALIVE_S = 10.0
"""Seconds between two messages: engines give a trainer up that is silent for
``--fp8rl-session-timeout-s``, 300 by default."""


@contextmanager
def kept_alive(members: Sequence[Participant]) -> Iterator[None]:
    """Meanwhile, send a message to each engine that has begun, every ``KEEP_ALIVE_S``.

    The message has no reply, so an engine that hangs neither delays the others nor has a reply to
    give later.

    Args:
        members: the engines that wait; none where nobody does.
    """
    if not members:
        yield
        return
    over = Event()

    def run() -> None:
        while not over.wait(KEEP_ALIVE_S):
            for ranks in [member.ranks for member in members]:
                if ranks is not None:
                    ranks.send({"op": "wait"})

    thread = Thread(target=run, name="fp8rl-keep-alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def collect_alive(leader: Leader, members: Sequence[Participant], value: T) -> list[T] | None:
    """``Leader.collect`` of ranks that share an update, while these engines wait.

    Raises:
        TimeoutError: a rank did not call it in time.
    """
    with kept_alive(members):
        return leader.collect(value, WAIT_S)
