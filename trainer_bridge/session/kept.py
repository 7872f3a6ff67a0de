"""What this process keeps between updates, of each engine and of its own weights: all of it belongs
to one object, and ends with it."""

import atexit
import time
import weakref
from typing import Any, NamedTuple

from sgl_fp8rl.protocol.place import is_reachable
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.states import State
from trainer_bridge.engines.engine_client import (
    CONTROL_TIMEOUT_S,
    EngineClient,
    connect,
    normalized,
    server_key,
)
from trainer_bridge.shards.placed_shards import ShardRegistry
from trainer_bridge.shards.shard_codes import CodesRegistry
from trainer_bridge.transfer.layout import check_layout
from trainer_bridge.transport.rank_client import DETACH_TIMEOUT_S, EngineRanks
from trainer_bridge.ways.remote import Base, Bases
from trainer_bridge.ways.sender import Sender

EXIT_TIMEOUT_S = 2.0
"""Seconds that the end of this process may wait for its engines to let go of its memory."""


class CommitDecision(NamedTuple):
    """An update that is to commit, as it was decided at the first try."""

    policy: Policy
    transaction: str
    """Engines know it by this name."""
    digests: tuple[str, ...] = ()
    """Of the weights of each rank, where an engine missed it and they are known."""


class EngineConnection:
    """One trainer's side of the way to one engine."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.policy: Policy | None = None
        """What this process committed last."""
        self.committed_at = 0
        """When, on this process's clock: versions of different runs have no order."""
        self.decided: CommitDecision | None = None
        """What was decided on, until every engine of the update has answered."""
        self.sender: Sender | None = None
        """Plans and memory, perhaps shared with other engines."""
        self.opened: tuple[str, ...] = ()
        """Seeds of the trainer's shards and codes that the engine has open."""
        self.base: Base | None = None
        """What an engine on another host is sent changes of."""
        self._layout: dict[str, Any] | None = None
        self._ranks: EngineRanks | None = None
        self.is_remote = False
        """Whether the engine runs on another host, or in a container of its own."""
        self.through_host = False
        """Whether updates go through host memory, because the engine cannot open the GPU's."""
        self.cannot_open_shards = False
        """Whether the engine could not open the memory of some rank of the trainer."""

    def layout(self, timeout_s: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        """The engine's layout, asked for once.

        Raises:
            EngineError: the engine cannot be reached, or is of another version.
        """
        if self._layout is None:
            layout = self.client.control({"op": "layout"}, timeout_s)
            check_layout(layout)
            self.is_remote = not is_reachable(layout["place"])
            self._layout = layout
        return self._layout

    @property
    def visible_gpus(self) -> set[str]:
        """The GPUs where every rank of the engine can read shards in place."""
        is_out_of_reach = self.cannot_open_shards or self.is_remote or self.through_host
        return set() if is_out_of_reach else set(self.layout()["visible_gpus"])

    def use(self, sender: Sender | None) -> None:
        """Go on with other plans and memory: every rank has let go of what there was."""
        previous, self.sender = self.sender, sender
        self.opened = () if sender is None else sender.opened
        if sender is not None:
            sender.join(self)
        if previous is not None and previous is not sender:
            previous.leave(self)

    def forget(self) -> None:
        """After a failure: the engine has let go, and another one may answer next time."""
        self.invalidate_layout()
        self.keep(None)
        self.use(None)

    def keep(self, ranks: EngineRanks | None) -> None:
        """Stay connected to the ranks that committed: once this ends, they let go of the memory."""
        previous, self._ranks = self._ranks, ranks
        if previous is not None:
            previous.close()

    def hang_up(self) -> None:
        """Begin to close: the engine lets go of this process's memory while others are told."""
        if self._ranks is not None:
            self._ranks.hang_up()

    def close(self, timeout_s: float = DETACH_TIMEOUT_S) -> None:
        """Have the engine let go of this process's memory, and free what was made for it."""
        if self._ranks is not None:
            self._ranks.detach(timeout_s)
        self.base = None
        self.forget()

    def committed(self, policy: Policy) -> None:
        """After an update: an engine that did not serve before it (dummy weights) knows only now
        what it keeps in FP8 and in FP32."""
        self.policy, self.committed_at = policy, time.monotonic_ns()
        if self.layout()["state"] != State.SERVING.value:
            self.invalidate_layout()

    def invalidate_layout(self) -> None:
        """Ask for the layout again: another engine may be at the address."""
        self._layout = None


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
        """
        if isinstance(engine, str):
            place = normalized(engine), server_key()
            if place not in self._by_address:
                self._by_address[place] = EngineConnection(connect(*place))
                self._alive.add(self._by_address[place])
            return self._by_address[place]
        if id(engine) not in self._of_objects:
            connect(engine)  # of a proxy, the error would not name the type
            # a strong reference from the entry to the engine would keep both
            self._of_objects[id(engine)] = EngineConnection(connect(weakref.proxy(engine)))
            self._alive.add(self._of_objects[id(engine)])
            weakref.finalize(engine, self._of_objects.pop, id(engine), None).atexit = False
        return self._of_objects[id(engine)]

    def opened(self) -> set[str]:
        """Seeds of the shards and codes that engines have open."""
        return {seed for connection in self._alive for seed in connection.opened}

    def close(self, engine: Any) -> None:
        """What ``trainer_bridge.close`` does."""
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
