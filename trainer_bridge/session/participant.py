"""The engines of one update: the session of each, from begin to commit or abort."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Any

from sgl_fp8rl.protocol.manifest import Manifest, ManifestError
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.states import FINISH
from sgl_fp8rl.protocol.values import as_python, excerpt
from trainer_bridge.engines.engine_client import CONTROL_TIMEOUT_S, EngineError
from trainer_bridge.session.kept import KEPT
from trainer_bridge.transport.rank_client import (
    LEAST_WAIT_S,
    SOCKET_TIMEOUT_S,
    EngineRanks,
    RankClients,
)
from trainer_bridge.transport.relay_client import RelayClient

STEP_TIMEOUT_S = 120.0
"""Seconds that one engine of several may take over a step, while the others wait."""
KEEP_ALIVE_S = 10.0
"""Seconds between two messages: engines give a trainer up that is silent for
``--fp8rl-session-timeout-s``, 300 by default."""


class Participant:
    """One engine in one update.

    Args:
        name: what errors call it.
        timeout_s: seconds that it may take over a step.
    """

    def __init__(self, name: str, engine: Any, timeout_s: float = SOCKET_TIMEOUT_S) -> None:
        self.name, self.connection, self.timeout_s = name, KEPT.connection_to(engine), timeout_s
        self._engine = engine  # the connection alone would not keep it during an update
        self.committed_before = False
        """Whether an earlier try at this update committed, though not on every engine."""
        self.ranks: EngineRanks | None = None
        """Its ranks, while its session is open."""
        self._ending: Thread | None = None
        """Waits for the end of a session that was left behind."""

    def begin(self, manifest: Manifest, message: dict[str, Any]) -> None:
        """Open a session.

        Raises:
            EngineError: the engine refused the update, or did not begin it in time, and goes on
                with what it has.
        """
        limit_s = CONTROL_TIMEOUT_S if message["in_flight"] == FINISH else self.timeout_s
        deadline = time.monotonic() + limit_s

        def control(message: dict[str, Any]) -> dict[str, Any]:
            left_s = max(deadline - time.monotonic(), LEAST_WAIT_S)
            return self.connection.client.control(message, left_s)

        message = {"op": "begin", "fingerprint": manifest.fingerprint, **message}
        policy = Policy(message["run"], message["version"])
        decided = self.connection.decided
        message["retry"] = decided is not None and decided[:2] == (policy, message["transaction"])
        if self.connection.is_remote:
            message["relay"] = True
        try:
            begun = control(message)
            if "unknown" in begun:
                begun = control({**message, "manifest": manifest.to_json()})
        except EngineError:
            self.connection.invalidate_layout()
            raise
        if begun.get("committed"):
            self.committed_before = True
            self.connection.committed(policy)
            return
        try:
            if self.connection.is_remote:
                host = getattr(self.connection.client, "host", None)
                relay, token = begun.get("relay"), begun.get("token")
                self.ranks = RelayClient(relay, token, host, self.timeout_s)
            else:
                self.ranks = RankClients(begun.get("sockets"), begun.get("token"), self.timeout_s)
        except EngineError:
            self._end()
            self.connection.forget()
            raise

    def commit(self, policy: Policy) -> None:
        """Commit on all ranks, and wait until the engine generates again.

        Raises:
            EngineError: a rank could not, and the engine is quarantined; or the answer got lost.
        """
        assert self.ranks is not None
        ranks, self.ranks = self.ranks, None
        try:
            ranks.ask({"op": "commit"})
        except BaseException:  # also Ctrl-C, whose traceback keeps the sockets open
            self._leave(ranks)
            raise
        self.connection.keep(ranks)
        self.connection.client.control({"op": "end"}, self.timeout_s)
        self.connection.committed(policy)

    def abort(self, why: str, fence: bool, others_go_on: bool = False) -> None:
        """End the session, if it is open.

        Args:
            fence: the engine must not serve what it served before.
            others_go_on: they do not wait for the end: this engine may hang.
        """
        if self.ranks is None:
            return
        ranks, self.ranks = self.ranks, None
        reason = f"the trainer gave up the update: {why}"
        ranks.send({"op": "abort", "reason": reason, "fence": fence})
        if others_go_on:
            ranks.close()
            self._ending = Thread(target=self._end, daemon=True)
            self._ending.start()
        else:
            self._leave(ranks)

    def await_end(self, timeout_s: float) -> None:
        """Give a session that was left behind some time to end."""
        if self._ending is not None:
            self._ending.join(max(timeout_s, 0.0))
            self._ending = None
            self.connection.forget()

    def _leave(self, ranks: EngineRanks) -> None:
        ranks.close()
        self._end()
        self.connection.forget()

    def _end(self) -> None:
        # the error that brought us here says more than an engine that is gone
        with suppress(EngineError):
            self.connection.client.control({"op": "end"}, self.timeout_s)


@contextmanager
def kept_alive(members: Sequence[Participant]) -> Iterator[None]:
    """Meanwhile, send a message to each engine that has begun, every ``KEEP_ALIVE_S``.

    The message has no reply, so an engine that hangs neither delays the others nor has a reply to
    give later.
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


def participants_of(engines: Any) -> list[Participant]:
    """The engines of an update, by address or number."""
    if isinstance(engines, str) or not isinstance(engines, Sequence):
        return [Participant("the engine", engines)]
    timeout_s = STEP_TIMEOUT_S if len(engines) > 1 else SOCKET_TIMEOUT_S
    participants = [
        Participant(each if isinstance(each, str) else f"engine {number}", each, timeout_s)
        for number, each in enumerate(engines)
    ]
    if not participants:
        raise EngineError("the list of engines is empty; pass one engine or more")
    for number, each in enumerate(participants):
        if any(each.connection is other.connection for other in participants[:number]):
            raise EngineError(f"{each.name} comes twice; pass each engine once")
    return participants


def check_required(require: int | None, engines: int) -> int:
    """How many engines must have the new version."""
    require = as_python(require)
    if require is None:
        return engines
    if type(require) is not int or not 1 <= require <= engines:
        raise ManifestError(
            f"require is {excerpt(require)} of {engines} engines; give a number from 1 to {engines}"
        )
    return require
