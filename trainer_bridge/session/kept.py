"""What this process keeps between updates: all of it belongs to one object, and ends with it."""

import atexit
import time
import weakref
from typing import Any

from trainer_bridge.engines.engine_client import EngineClient, connect, normalized, server_key
from trainer_bridge.session.engine_connection import EngineConnection
from trainer_bridge.shards.placed_shards import ShardRegistry
from trainer_bridge.shards.shard_codes import CodesRegistry
from trainer_bridge.ways.changes import Bases
from trainer_bridge.ways.sender import Sender

EXIT_TIMEOUT_S = 2.0
"""Seconds that the end of this process may wait for its engines to let go of its memory."""


class Kept:
    """One connection for each engine, and what the ranks of a trainer remember of its weights."""

    def __init__(self) -> None:
        self.shards = ShardRegistry()
        self.codes = CodesRegistry()
        self.bases = Bases()
        """What this rank sent to engines on other hosts, where it does not lead."""
        self.part: Sender | None = None
        """For the engines that this rank sent a part to last."""
        self._by_address: dict[tuple[str, str | None], EngineConnection] = {}
        self._of_objects: dict[int, EngineConnection] = {}
        """Of each engine that is an object, by its id. An entry ends with the engine."""
        self._alive: weakref.WeakSet[EngineConnection] = weakref.WeakSet()

    def connection_to(self, engine: Any) -> EngineConnection:
        """The link to an engine, the same one at each update.

        Args:
            engine: an ``sgl.Engine``, an ``http://`` address, or a client.

        Raises:
            EngineError: it is none of these.
        """
        if isinstance(engine, str):
            place = normalized(engine), server_key()
            if place not in self._by_address:
                self._by_address[place] = self._made(connect(*place))
            return self._by_address[place]
        if id(engine) not in self._of_objects:
            connect(engine)  # of a proxy, the error would not name the type
            # a strong reference from the entry to the engine would keep both
            self._of_objects[id(engine)] = self._made(connect(weakref.proxy(engine)))
            weakref.finalize(engine, self._of_objects.pop, id(engine), None).atexit = False
        return self._of_objects[id(engine)]

    def _made(self, client: EngineClient) -> EngineConnection:
        connection = EngineConnection(client)
        self._alive.add(connection)
        return connection

    @property
    def is_empty(self) -> bool:
        """Whether there is no engine to disconnect from."""
        return not self._by_address and not self._of_objects

    def opened(self) -> set[str]:
        """Seeds of the shards and codes that engines have open."""
        return {seed for connection in self._alive for seed in connection.opened}

    def close(self, engine: Any) -> None:
        """Disconnect from an engine: it unmaps this process's GPU memory, which can then be reused.

        This happens automatically at exit. A later ``update`` connects again. Codes of shards that
        no engine has open any more are freed. The trainer's other ranks, which have no engine, free
        theirs at the next update; or they call ``close(None)`` once the first rank's call has
        returned.

        Args:
            engine: as for ``update``; nothing happens if it was never updated.

        Raises:
            EngineError: it is a string, but not an address.
        """
        had = self.opened()
        if isinstance(engine, list | tuple):
            for each in engine:
                self.close(each)
        elif isinstance(engine, str):
            address = normalized(engine)
            for known in [known for known in self._by_address if known[0] == address]:
                self._by_address.pop(known).close()
        elif id(engine) in self._of_objects:
            self._of_objects.pop(id(engine)).close()
        left = self.opened()
        if engine is None or had - left:
            self.codes.release(left)
        if engine is None:
            self.bases.forget()

    def close_all(self, timeout_s: float = EXIT_TIMEOUT_S) -> None:
        """Disconnect from every engine, and forget all."""
        connections = list(self._alive)
        for connection in connections:  # close all before waiting for one that is busy
            connection.hang_up()
        deadline = time.monotonic() + timeout_s
        for connection in connections:
            connection.close(deadline - time.monotonic())
        self._by_address.clear()
        self._of_objects.clear()
        self._alive.clear()
        self.shards.forget()
        self.codes.forget()
        self.bases.forget()
        self.part = None


KEPT = Kept()
"""That of this process."""
atexit.register(KEPT.close_all)
