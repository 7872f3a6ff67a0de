"""An update on one rank, from ``begin`` to commit or quarantine, as the ranks decide together."""

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import Manifest, ManifestError, check_policy, wrong_names
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.states import RETRACT
from sgl_fp8rl.protocol.values import attempt, excerpt
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from sgl_fp8rl.receiver.host import EngineHost
from sgl_fp8rl.receiver.kv.incoming_scales import names_in
from sgl_fp8rl.receiver.kv.scales import KVScales
from sgl_fp8rl.receiver.rank_server import (
    LONGEST_NAME,
    Outcome,
    RankSocket,
    committed,
    reply,
    serve,
)
from sgl_fp8rl.receiver.routes.routes import RouteError

logger = logging.getLogger(__name__)

PAUSED = (
    "generation is paused, so requests in flight cannot end; continue_generation first, or "
    "update with in_flight='retract'"
)
Reply = dict[str, Any]
T = TypeVar("T")
Gather = Callable[[Any], list[Any]]
"""Takes this rank's value and returns those of all, in rank order; every rank calls it."""


def run(host: EngineHost, weights: EngineWeights, message: dict[str, Any]) -> Reply:
    """Take an update from ``begin`` to its end, and return what is answered then.

    Once the session is open, ``host`` tells its sockets.
    """
    try:
        policy = check_policy(message.get("run"), message.get("version"))
        transaction = _transaction(message)
        if message.get("retry") and _has_committed(host, weights, transaction, policy):
            return {"committed": True}
        if message.get("in_flight") == RETRACT and (why := host.why_not_retract()) is not None:
            raise ManifestError(why)
        fingerprint = _prepare(host, weights, policy, message)
    except ManifestError as error:
        return {"error": str(error)}
    rank_socket, ranks = _listen(host, weights, fingerprint, message)
    if rank_socket is None:
        errors = [rank.error for rank in ranks if rank.error is not None]
        if not all(rank.knows for rank in ranks):
            return {"unknown": True}
        return {"error": errors[0]} if errors else {"busy": True}
    try:
        if message.get("in_flight") == RETRACT and not all(host.gather(host.retract())):
            return {"busy": True}
        session = weights.begin(fingerprint, policy)
        host.tell({"sockets": [rank.path for rank in ranks]})
        silence_s = weights.options.session_timeout_s
        engines = message.get("engines")
        num_engines = engines if type(engines) is int else 1
        outcome, peer = serve(rank_socket, session, message["token"], silence_s, num_engines)
    finally:
        rank_socket.close()
    return _end(host, weights, transaction, outcome, peer)


def _transaction(message: dict[str, Any]) -> str:
    """The name that the trainer gives an update; ManifestError if it is none."""
    name = message.get("transaction")
    if type(name) is not str or not 0 < len(name) <= LONGEST_NAME:
        raise ManifestError(
            f"the update's transaction is {excerpt(name)}; install the same sgl-fp8rl on both sides"
        )
    return name


def _has_committed(
    host: EngineHost, weights: EngineWeights, transaction: str, policy: Policy
) -> bool:
    """Whether this engine has what its trainer decided to commit, also where it was not told."""
    if weights.committed_by(transaction, policy):
        return True
    if not all(host.gather(weights.is_in_doubt(transaction, policy))):
        return False
    weights.settle()
    host.committed(policy)
    return True


def _prepare(
    host: EngineHost, weights: EngineWeights, policy: Policy, message: dict[str, Any]
) -> str:
    """Check an update against this engine and return the fingerprint of its manifest.

    Every rank takes the same way through here, since ranks know the same manifests.

    Raises:
        ManifestError: it must not begin, on this rank or on another.
    """
    recorded_before = weights.table is not None

    def read() -> Manifest | str:
        """The manifest, or the fingerprint of one that came before."""
        weights.check_policy(policy)
        if "manifest" not in message:
            return str(message.get("fingerprint"))
        manifest = Manifest.from_json(message["manifest"])
        _check_kv_scales(weights, manifest)
        return manifest

    manifest, error = attempted(read, "an update to %s", policy)
    if isinstance(manifest, str):
        return manifest
    if manifest is not None:
        _, error = attempted(partial(weights.accept, manifest), "an update to %s", policy)
    errors = [e for e in host.gather(error) if e is not None]
    if not errors and manifest is not None:
        errors = _unrouted(host, weights, manifest.streamed)
    if errors or manifest is None:
        if manifest is not None:
            weights.forget(manifest.fingerprint)
        if not recorded_before:
            weights.table = None  # recorded from this manifest, so it must not outlive it
        raise ManifestError(errors[0])
    return manifest.fingerprint


def _check_kv_scales(weights: EngineWeights, manifest: Manifest) -> None:
    """Raise ManifestError if ``kv_scheme`` is ``trainer``, and no scales come."""
    needs = isinstance(weights.kv, KVScales) and weights.kv.scheme == "trainer"
    if needs and not names_in(manifest.tensors):
        raise ManifestError(
            f"the update brings no {KV_SCALES}, which an engine with --fp8rl-kv-scheme trainer "
            f"needs; pass kv_scales to trainer_bridge.update, or start with scheme engine"
        )


def _unrouted(host: EngineHost, weights: EngineWeights, streamed: bool) -> list[str]:
    """Names that no rank keeps: known of a checkpoint, unknown in a first update."""
    assert weights.table is not None
    unrouted = skipped_by_all(weights, host.gather) - weights.table.skipped
    if streamed:  # its names are those of a checkpoint, and need not come
        weights.table.skipped |= unrouted
        return []
    if not unrouted:
        return []
    return [wrong_names(unknown=unrouted)]


def skipped_by_all(weights: EngineWeights, gather: Gather) -> set[str]:
    """The HF tensors that have a route, or need the loader, on no rank."""
    table = weights.table
    assert table is not None
    mine = {n for n, routes in table.routes.items() if not routes and n not in table.fallback}
    return set.intersection(*gather(mine))


@dataclass(frozen=True)
class _Ready:
    """What one rank says before a session begins."""

    knows: bool
    """Whether it has the manifest."""
    error: str | None
    idle: bool
    path: str


def _listen(
    host: EngineHost, weights: EngineWeights, fingerprint: str, message: dict[str, Any]
) -> tuple[RankSocket | None, list[_Ready]]:
    """Open this rank's socket if every rank can begin, and say what each of them can."""
    in_flight = message.get("in_flight")
    # what retracts is idle when it must be: nothing is disturbed before all is ready to begin;
    # on all ranks or none, so it does not depend on what this one has
    idle = in_flight == RETRACT or host.make_idle()
    # a copy of weights may be made after the start
    rank_socket, failure = None, host.why_not_written(weights.model) if idle else None
    if failure is None and idle:
        try:
            rank_socket = RankSocket(host.rank)
        except OSError as error:
            failure = (
                f"the engine cannot open a socket in its temporary folder: {error}; set TMPDIR"
            )
    # as the main process has it: a user's continue_generation may still be on its way to here
    elif failure is None and message.get("paused") is True and host.holds_requests(in_flight):
        failure = PAUSED
    path = str(rank_socket.path) if rank_socket is not None else ""
    ranks = host.gather(_Ready(weights.knows(fingerprint), failure, idle, path))
    begins = all(rank.knows and rank.idle and rank.error is None for rank in ranks)
    if rank_socket is not None and not begins:
        rank_socket.close()
        rank_socket = None
    return rank_socket, ranks


def _end(
    host: EngineHost,
    weights: EngineWeights,
    transaction: str,
    outcome: Outcome,
    peer: socket.socket | None,
) -> Reply:
    """Commit, quarantine or go on, as the ranks decide together, and tell the trainer."""
    assert weights.session is not None
    policy = weights.session.policy
    outcomes = host.gather(outcome)
    failed = next((o for o in outcomes if not o.committed), None)
    if failed is None or committed(outcomes):
        weights.commit(transaction)
        if peer is None:
            weights.memory.close()  # its trainer is gone
        host.committed(policy)
        reply(peer, {"ok": True})
        return {"ended": True, "failure": None, **weights.status}
    if any(o.dirty for o in outcomes) and not _undone(host, weights, outcomes):
        voted_for = transaction if all(o.voted for o in outcomes) else ""
        weights.quarantine(
            f"the update to version {policy.version} failed: {failed.reason}; a complete update "
            f"to this version or a newer one heals the engine",
            voted_for,
        )
        host.refuse_waiting(weights.why_not_generate)
    else:
        weights.resume()
    reply(peer, {"error": failed.reason})
    return {"ended": False, "failure": failed.reason, **weights.status}


def _undone(host: EngineHost, weights: EngineWeights, outcomes: list[Outcome]) -> bool:
    """Go back to the version before on every rank, if each can."""
    if not all(o.can_roll_back or not o.dirty for o in outcomes):
        return False
    assert weights.session is not None
    _, error = attempted(weights.session.undo, "undoing an update")
    return all(each is None for each in host.gather(error))


def attempted(action: Callable[[], T], what: str, *values: object) -> tuple[T | None, str | None]:
    """The result of an action on this rank, or the error that the other ranks are given.

    Args:
        what, values: name the action in the log, where the error is not a refusal.
    """
    result, fault = attempt(action)
    if fault is None:
        return result, None
    if not isinstance(fault, ManifestError | RouteError):
        logger.error(f"{what} failed on this rank", *values, exc_info=fault)
    return None, str(fault) or type(fault).__name__


def gather_results(action: Callable[[], T], what: str, gather: Gather) -> list[T]:
    """What ``action`` returns on every rank, in rank order.

    Raises:
        ManifestError: on all ranks, where it failed on one: none waits for what does not come.
    """
    ranks = gather(attempted(action, what))
    for _, error in ranks:
        if error is not None:
            raise ManifestError(error)
    return [result for result, _ in ranks]


def merged(names: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    """How the ranks keep HF tensors (``RouteTable.names``): with expert parallelism each has other
    experts."""
    ranks = [each for each in names if each is not None]
    if not ranks:
        return {"fp32": None, "formats": {}}
    formats: dict[str, set[str]] = {}
    for rank in ranks:
        for name, tensors in rank["formats"].items():
            formats.setdefault(name, set()).update(tensors)
    return {
        "fp32": sorted({name for rank in ranks for name in rank["fp32"]}),
        "formats": {name: sorted(tensors) for name, tensors in formats.items()},
    }
