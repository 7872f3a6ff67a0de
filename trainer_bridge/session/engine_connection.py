"""What a trainer keeps of one engine between updates."""

import logging
import secrets
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.place import is_reachable
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.states import State
from trainer_bridge.engines.engine_client import CONTROL_TIMEOUT_S, EngineClient, EngineError
from trainer_bridge.transfer.layout import check_layout
from trainer_bridge.transport.rank_client import DETACH_TIMEOUT_S, EngineRanks
from trainer_bridge.ways.changes import Base
from trainer_bridge.ways.sender import Sender

logger = logging.getLogger(__name__)


class CommitDecision(NamedTuple):
    """An update that is to commit, as it was decided at the first try."""

    policy: Policy
    transaction: str
    """Engines know it by this name."""
    digests: tuple[str, ...] = ()
    """Of the weights of each rank, where an engine missed it and they are known."""

    def check_same(self, digests: Iterable[str]) -> None:
        """Check that a second try brings what the first one brought.

        Args:
            digests: of the weights of each rank; "" where unknown.

        Raises:
            ManifestError: it brings something else.
        """
        found = tuple(digests)
        if "" not in found and found != self.digests:
            raise ManifestError(
                f"the weights or KV scales have changed since an earlier try at {self.policy}, "
                f"which engines have committed; update all of them to a newer version"
            )


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

        Args:
            timeout_s: seconds to wait for it.

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

    def use_host_memory(self, why: EngineError) -> None:
        """From now on: what the engine could not open once, it is not asked to open again."""
        self.through_host = True
        logger.warning("updates go through host memory, which is slower: %s", why)

    def committed(self, policy: Policy) -> None:
        """After an update: an engine that did not serve before it (dummy weights) knows only now
        what it keeps in FP8 and in FP32."""
        self.policy, self.committed_at = policy, time.monotonic_ns()
        if self.layout()["state"] != State.SERVING.value:
            self.invalidate_layout()

    def invalidate_layout(self) -> None:
        """Ask for the layout again: another engine may be at the address."""
        self._layout = None


def decision_on(policy: Policy, known: Iterable[CommitDecision | None]) -> CommitDecision:
    """That of an earlier try, or a new one.

    Args:
        known: the last decision about each engine.
    """
    earlier = next((d for d in known if d is not None and d.policy == policy), None)
    return earlier or CommitDecision(policy, secrets.token_hex(16))
