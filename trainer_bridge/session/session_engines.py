"""The engines that one update sends the same: what is said to one is said to every rank of all."""

import time
from collections.abc import Callable
from typing import Any

from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.session.participant import Participant
from trainer_bridge.transport.rank_client import EngineRanks, UnreachableMemoryError


class SessionEngines:
    """The ``Ranks`` of all engines.

    Args:
        lose: called with an engine that failed; it raises where the update cannot go on without.
    """

    def __init__(
        self, members: list[Participant], lose: Callable[[Participant, EngineError], None]
    ) -> None:
        self.members, self._lose = members, lose

    @property
    def open(self) -> list[tuple[Participant, EngineRanks]]:
        """The engines whose session is open, with their ranks."""
        return [(member, member.ranks) for member in self.members if member.ranks is not None]

    @property
    def ranks(self) -> list[EngineRanks]:
        return [ranks for _, ranks in self.open]

    @property
    def known(self) -> set[str]:
        """Names of the shared memory that every rank of every engine has open."""
        known = [ranks.known for ranks in self.ranks]
        return set.intersection(*known) if known else set()

    @property
    def network_bytes(self) -> int:
        """Bytes of chunks that engines on other hosts were sent from here."""
        return sum(ranks.network_bytes for ranks in self.ranks)

    def ask(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        """Send a message to every rank of every engine and wait for their replies."""
        for ranks in self.ranks:
            ranks.send(message, fds)
        return self.wait()

    def wait(self) -> list[dict[str, Any]]:
        """The next reply of every rank; an engine that has none is lost.

        Raises:
            EngineError: the update cannot go on without that engine.
        """
        replies: list[dict[str, Any]] = []
        began = time.monotonic()
        for member, ranks in self.open:
            try:
                replies += ranks.wait(began)
            except UnreachableMemoryError:
                raise
            except EngineError as error:
                self._lose(member, error)
        return replies
