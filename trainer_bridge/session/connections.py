"""The connections of this process: one for each engine, closed when it exits."""

import atexit
import time
import weakref
from typing import Any

from trainer_bridge.engines.engine_client import EngineClient, connect, normalized, server_key
from trainer_bridge.session.engine_connection import EngineConnection
from trainer_bridge.session.part_sender import IMAGES
from trainer_bridge.shards.shard_codes import CODES_REGISTRY

EXIT_TIMEOUT_S = 2.0
"""Seconds that the end of this process may wait for its engines to let go of its memory."""
_connections: dict[tuple[str, str | None], EngineConnection] = {}
_of_objects: dict[int, EngineConnection] = {}
"""Of each engine that is an object, by its id. An entry ends with the engine."""
_alive: weakref.WeakSet[EngineConnection] = weakref.WeakSet()


def connection_to(engine: Any) -> EngineConnection:
    """The link to an engine, the same one at each update.

    Args:
        engine: an ``sgl.Engine``, an ``http://`` address, or a client.

    Raises:
        EngineError: it is none of these.
    """
    if isinstance(engine, str):
        address, key = normalized(engine), server_key()
        if (address, key) not in _connections:
            _connections[address, key] = _made(connect(address, key))
        return _connections[address, key]
    if id(engine) not in _of_objects:
        connect(engine)  # of a proxy, the error would not name the type
        # a strong reference from the entry to the engine would keep both
        _of_objects[id(engine)] = _made(connect(weakref.proxy(engine)))
        weakref.finalize(engine, _of_objects.pop, id(engine), None).atexit = False
    return _of_objects[id(engine)]


def _made(client: EngineClient) -> EngineConnection:
    connection = EngineConnection(client)
    _alive.add(connection)
    return connection


def close(engine: Any) -> None:
    """Disconnect from an engine: it unmaps this process's GPU memory, which can then be reused.

    This happens automatically at exit. A later ``update`` connects again. Codes of shards that no
    engine has open any more are freed. The trainer's other ranks, which have no engine, free theirs
    at the next update; or they call ``close(None)`` once the first rank's call has returned.

    Args:
        engine: as for ``update``; nothing happens if it was never updated.

    Raises:
        EngineError: it is a string, but not an address.
    """
    had = opened()
    if isinstance(engine, list | tuple):
        for each in engine:
            close(each)
    elif isinstance(engine, str):
        address = normalized(engine)
        for known in [known for known in _connections if known[0] == address]:
            _connections.pop(known).close()
    elif id(engine) in _of_objects:
        _of_objects.pop(id(engine)).close()
    left = opened()
    if engine is None or had - left:
        CODES_REGISTRY.release(left)
    if engine is None:
        IMAGES.forget()


def opened() -> set[str]:
    """Seeds of the shards and codes that engines have open."""
    return {seed for connection in _alive for seed in connection.opened}


@atexit.register
def close_all() -> None:
    """Disconnect from every engine."""
    connections = list(_alive)
    for connection in connections:  # close all before waiting for one that is busy
        connection.hang_up()
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    for connection in connections:
        connection.close(deadline - time.monotonic())
