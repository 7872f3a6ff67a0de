"""One update of one engine or several: each has all that it needs before any commits."""

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.policy import Policy
from trainer_bridge.engines.engine_client import EngineClient, EngineError, call_all
from trainer_bridge.ranks.rank_values import exchanged
from trainer_bridge.session.kept import CommitDecision
from trainer_bridge.session.participant import Participant, kept_alive
from trainer_bridge.session.update_session import UpdateSession
from trainer_bridge.sources.parameters import Named
from trainer_bridge.transfer.layout import comparable, gpu_of, read_by_all
from trainer_bridge.transfer.transfer_plan import TransferPlan
from trainer_bridge.transport.rank_client import DETACH_TIMEOUT_S, UnreachableMemoryError
from trainer_bridge.ways.sender import Sender

logger = logging.getLogger(__name__)

MakePlan = Callable[[Sender, EngineClient, torch.device | None], TransferPlan]
"""Of the engines' sender, one of them, and the trainer's GPU if they can read it."""


@exchanged
class MissedCommitError(EngineError):
    """What was decided is not committed on every engine that must have it."""


@exchanged
class BeginResult(NamedTuple):
    """What the rank that leads learned of the other ranks and of the engines."""

    policy: Policy
    """What all ranks update to."""
    committed_before: bool
    """Whether an earlier try at this update committed on every engine that is in this one."""
    layouts: list[dict[str, Any]]
    """Of each session, what ``read_by_all`` leaves."""
    failed: dict[str, str]
    """Why engines are not in the update, by name."""
    mapped: list[list[bool]]
    """For each session, which parameters the engines read in place: no rank gathers them."""
    in_parts: bool
    """Whether several ranks may send."""
    is_second_try: bool
    """Whether the weights of an earlier try, which not every engine has, are known: these must be
    the same."""
    reads_codes: bool
    """Whether engines read codes that the ranks make: no rank may be without them."""


class Transaction:
    """The sending side of one update, on the rank that leads: a two-phase commit.

    Every engine begins, is sent the weights, and votes by its ranks' answers to ``finish``; then
    all that voted commit. One that fails before the vote is left out where ``required`` allows it,
    and otherwise ends the update on all. The vote decides: an engine that fails after it misses a
    commit that the others make, and is quarantined.

    Args:
        named: the weights, or none where they are a stream.
        make_plan: what the engines of one layout are sent.
        required: how many of them must vote.

    Raises:
        EngineError: too few engines began; none was written to.
        ManifestError: the weights cannot make an update.
    """

    def __init__(
        self,
        participants: list[Participant],
        named: Named,
        make_plan: MakePlan,
        policy: Policy,
        in_flight: str,
        required: int,
    ) -> None:
        self._named, self._make_plan = named, make_plan
        self._everyone, self.active = participants, list(participants)
        """All engines, and those that are still in the update."""
        self._policy, self._required = policy, required
        known = (p.connection.decided for p in participants)
        earlier = (each for each in known if each is not None and each.policy == policy)
        self._decision = next(earlier, CommitDecision(policy, secrets.token_hex(16)))
        self._is_decided = False
        self.failed: dict[str, str] = {}
        """Why engines are no longer in the update, by name."""
        self.sessions: list[UpdateSession] = []
        """One for all engines of a layout; none when all is over."""
        self.sent = 0, 0, 0, 0
        """Tensors, bytes and mapped bytes that an engine was sent, and bytes of all that were sent
        over a network."""
        message = {
            "run": policy.run,
            "version": policy.version,
            "transaction": self._decision.transaction,
            "in_flight": in_flight,
            "engines": len(participants),
        }
        try:
            while not self._begin(message):
                continue
        except BaseException as error:  # whatever it is, the engines must be told
            self.close(error)
            raise

    def begun(self) -> BeginResult:
        """The result for the other ranks."""
        return BeginResult(
            self._policy,
            all(member.committed_before for member in self.active),
            [read_by_all(session.sender.layout) for session in self.sessions],
            self.failed,
            [session.plan.mapped for session in self.sessions],
            len(self.sessions) == 1 and self.sessions[0].plan.senders > 1,
            bool(self._decision.digests),
            any(session.plan.coded for session in self.sessions),
        )

    def check_same(self, digests: list[str]) -> None:
        """Check that a second try brings what the first one brought; nothing was written.

        Args:
            digests: of the weights of each rank; "" where unknown.
        """
        if "" not in digests and tuple(digests) != self._decision.digests:
            raise ManifestError(
                f"the weights or KV scales have changed since an earlier try at {self._policy}, "
                f"which engines have committed; update all of them to a newer version"
            )

    def remember(self, digests: list[str]) -> None:
        """Remember the weights, for a second try; arguments as for ``check_same``."""
        if "" not in digests:
            self._decide(self._decision._replace(digests=tuple(digests)))

    def end(self) -> None:
        """Nothing was to be sent."""
        self._settle()
        self._end_sessions()

    def finish(self) -> float | None:
        """Send what is left, and have every engine vote."""
        plans = [session.plan for session in self.sessions]
        # an engine that was lost on the way has not had all of a stream
        sent = max((*plan.sent, plan.mapped_bytes) for plan in plans)
        seconds = [session.finish() for session in self.sessions]
        self.sent = *sent, sum(session.network_bytes for session in self.sessions)
        return max((each for each in seconds if each is not None), default=None)

    def commit(self) -> None:
        """Commit on all engines that voted, and wait until they generate again.

        Where an answer gets lost, another try at this policy learns whether it committed.

        Raises:
            EngineError: an engine did not answer, and each was required.
        """
        self._is_decided = True
        self._decide(self._decision)
        voted = [member for member in self.active if member.ranks is not None]
        lost: EngineError | None = None
        for member, error in _at_once({p: partial(p.commit, self._policy) for p in voted}):
            if error is not None:
                self.active.remove(member)
                self.failed[member.name] = str(error)
                lost = error
        for session in self.sessions:
            session.committed()
        self._await_lost()
        self._end_sessions()
        if lost is not None and len(self.active) < self._required:
            if len(self._everyone) == 1:
                raise MissedCommitError(str(lost), lost.status) from lost
            missing = "; ".join(f"{name} ({why})" for name, why in self.failed.items())
            raise MissedCommitError(
                f"{self._policy} is committed on {len(self.active)} of {len(self._everyone)} "
                f"engines, but not on {missing}; update again with the same version, or without "
                f"what is gone",
                lost.status,
            )
        self._settle()

    def close(self, error: BaseException) -> None:
        """Abort on every engine that has not committed; its quarantine says why."""
        why = str(error) or type(error).__name__
        # after the decision, others may have committed
        _at_once({p: partial(p.abort, why, self._is_decided) for p in self._everyone})
        self._await_lost()
        self._end_sessions()

    def _begin(self, message: dict[str, Any]) -> bool:
        """Plan, and open a session with every engine.

        Returns:
            False where engines cannot open the GPU's memory: from now on the host's is used.
        """
        self.sessions = [self._planned(*group) for group in self._by_layout()]
        beginning = {
            member: partial(member.begin, session.plan.manifest, message)
            for session in self.sessions
            for member in session.members
        }
        with kept_alive(self.active if len(self.active) > 1 else ()):
            begun = _at_once(beginning)
        for member, error in begun:
            if error is not None:
                self.lose(member, error)
        for session in self.sessions:
            try:
                session.open()
            except UnreachableMemoryError as error:
                if session.device is None:
                    raise
                give_up = _gather if session.sender.reads_shards else _use_host_memory
                self.close(error)
                give_up(session.members, error)
                return False
        return True

    def _by_layout(self) -> list[tuple[list[Participant], dict[str, Any]]]:
        """The engines that are equal in all that a plan depends on, together."""
        asked = {p: partial(p.connection.layout, p.timeout_s) for p in self.active}
        for member, error in _at_once(asked):
            if error is not None:
                self.lose(member, error)
        together: list[tuple[list[Participant], dict[str, Any]]] = []
        for member in self.active:
            connection = member.connection
            layout = comparable(connection.layout(), connection.through_host, connection.is_remote)
            for members, known in together:
                if known == layout:
                    members.append(member)
                    break
            else:
                together.append(([member], layout))
        return together

    def _planned(self, members: list[Participant], layout: dict[str, Any]) -> UpdateSession:
        gpus = {gpu for member in members for gpu in member.connection.layout()["gpus"]}
        visible = set.intersection(*(member.connection.visible_gpus for member in members))
        layout = {**layout, "gpus": sorted(gpus), "visible_gpus": sorted(visible)}
        kept = [member.connection.sender for member in members]
        sender = next((s for s in kept if s is not None and s.layout == layout), None)
        sender = sender or Sender(layout)
        sender.share_with([member.connection for member in members])
        device = gpu_of(self._named, layout)
        if device is not None:
            torch.cuda.synchronize(device)  # the optimizer's last step is in the weights
        device = None if layout["through_host"] else device
        try:
            plan = self._make_plan(sender, members[0].connection.client, device)
        except ManifestError:
            # another engine may be at the address next time, with a larger bucket or FP8 KV
            for member in members:
                member.connection.invalidate_layout()
            raise
        except UnreachableMemoryError as error:
            _use_host_memory(members, error)
            return self._planned(members, {**layout, "through_host": True})
        return UpdateSession(members, sender, plan, device, self.lose)

    def lose(self, member: Participant, error: EngineError) -> None:
        """Go on without an engine.

        Raises:
            EngineError: too few are left.
            UnreachableMemoryError: that is what failed, which all can go around.
        """
        if isinstance(error, UnreachableMemoryError):
            raise error
        self.active.remove(member)
        self.failed[member.name] = str(error)
        if len(self.active) < self._required:
            where = "" if len(self._everyone) == 1 else f"{member.name}: "
            # not the error itself: frames that refer to it would be in its traceback, and a cycle
            # keeps the trainer's tensors
            raise EngineError(f"{where}{error}", error.status) from error
        logger.warning("the update to %s goes on without %s: %s", self._policy, member.name, error)
        member.abort(str(error), fence=True, others_go_on=True)

    def _decide(self, decision: CommitDecision) -> None:
        self._decision = decision
        for member in self._everyone:
            member.connection.decided = decision

    def _await_lost(self) -> None:
        """Give engines that were left behind a while to end their sessions."""
        deadline = time.monotonic() + DETACH_TIMEOUT_S
        for member in self._everyone:
            member.await_end(deadline - time.monotonic())

    def _end_sessions(self) -> None:
        while self.sessions:
            self.sessions.pop().close()

    def _settle(self) -> None:
        """The version is old from now on, unless an engine still lacks it."""
        if not self.failed:
            for member in self._everyone:
                member.connection.decided = None


def _gather(members: list[Participant], error: EngineError) -> None:
    logger.warning("shards are gathered, which is slower: %s", error)
    for member in members:
        member.connection.cannot_open_shards = True


def _use_host_memory(members: list[Participant], error: EngineError) -> None:
    """What the engines could not open once, they are not asked to open again."""
    logger.warning("updates go through host memory, which is slower: %s", error)
    for member in members:
        member.connection.through_host = True


def _at_once(
    calls: Mapping[Participant, Callable[[], Any]],
) -> list[tuple[Participant, EngineError | None]]:
    """What went wrong with each."""
    results = call_all([(p.connection.client, call) for p, call in calls.items()])
    return [
        (member, result if isinstance(result, EngineError) else None)
        for member, result in zip(calls, results, strict=True)
    ]
