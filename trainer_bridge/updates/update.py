"""``update``: bring the engine to the trainer's weights, as one new policy version."""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import ManifestError, check_in_flight, check_policy
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.states import ABORT
from sgl_fp8rl.protocol.values import as_python
from trainer_bridge.ranks.collective import Leader, ranks_of
from trainer_bridge.ranks.rank_values import exchanged
from trainer_bridge.session.kept import KEPT
from trainer_bridge.session.participant import check_required, participants_of
from trainer_bridge.session.transaction import MissedCommitError, Transaction
from trainer_bridge.sources.announcement import Announcement
from trainer_bridge.sources.hf_names import group_of
from trainer_bridge.sources.parameters import NamedTensors
from trainer_bridge.updates.weights import Clock, Report, Stream, Weights, WholeModel

RUN = secrets.token_hex(4)
"""The run of this process, unless ``update`` is given another: a new process is a new run."""
PRESENCE_S = 60.0
"""Seconds that the first rank waits until all others have said that they have not left the update,
or what they hold."""


@exchanged
class PolicyRequest(NamedTuple):
    """The policy that one rank asks for, and how."""

    policy: Policy
    in_flight: str
    names_run: bool
    """Whether it names the run; otherwise that is the first rank's."""


@dataclass(frozen=True)
class UpdateResult:
    """What an update did."""

    run: str
    """The run that ``version`` belongs to."""
    version: int
    """The policy version that generates now."""
    tensors: int
    """HF tensors that were sent."""
    bytes: int
    """Payload in bytes, read by every rank of the engine."""
    mapped_bytes: int
    """How much of it was read in place, from the trainer's own memory."""
    seconds: dict[str, float]
    """Wall time by stage: ``begin`` (check, pause, flush), ``quantize`` (wait for ranks of the
    trainer that quantize), ``read`` (gather and cast), ``write`` (copy to the bucket, wait for
    engines), ``commit``; and ``total``. Stages that were not entered are left out."""
    gpu_seconds: float | None
    """Time of the engines' kernels on the slowest GPU; None on a CPU."""
    network_bytes: int = 0
    """Bytes of weights that were sent to engines on other hosts, to all of them together: fewer
    than ``bytes`` where they have kept the last update, and only what changed was sent."""
    failed: dict[str, str] = field(default_factory=dict)
    """Why engines do not have this version, by address or number: ``require`` allowed it."""


def update(
    model_or_named_tensors: nn.Module | NamedTensors,
    engine: Any,
    *,
    version: int,
    run: str | None = None,
    kv_scales: torch.Tensor | None = None,
    in_flight: str = ABORT,
    require: int | None = None,
    group: dist.ProcessGroup | None = None,
    announce: Announcement | None = None,
) -> UpdateResult:
    """Stream weights into a running engine, or several, and commit them as policy ``version``.

    Requests that are running are aborted, finished or retracted, as ``in_flight`` says; new ones
    wait for the end of the update. Parameters on a GPU whose addresses have not changed since the
    last update are read in place; others pass through a bucket, quantized by the trainer's GPU
    where it has one. If anything fails after the first write, the engine refuses to generate until
    a later update is complete.

    Args:
        model_or_named_tensors: a module whose parameters have HF names (plain, or in wrappers in
            any order; adapters of PEFT are merged), or a mapping or list of (HF checkpoint name,
            tensor): BF16, FP16, FP32, or FP8 E4M3 codes with ``<name>_scale_inv``. Or an iterator
            of such pairs, as frameworks provide, for which all ranks gather each tensor together:
            it is walked once, to its end even if the update fails. A tensor that comes before its
            turn (in another order than the last time, or behind codes whose scales come later) is
            copied; at worst that holds the whole model.
        engine: an ``sgl.Engine`` or an ``http://`` address, or a list of them, which commit all or
            none. With FSDP2 or DDP every rank calls, and only the engine of the first is used; the
            others pass None.
        version: a whole number, greater than the last one of this run. It is safe to call again
            with the version of a failed call and the same weights: engines that committed it stay
            committed.
        run: a name for this run of the trainer, by default one of this process. A new run may
            begin at any version, so that a trainer can resume from a checkpoint; from its first
            update on, the engine refuses the run before it. The first rank's run is used; the other
            ranks pass the same or None.
        in_flight: what happens to running requests. ``"abort"``: they return the tokens that they
            have. ``"finish"``: the update waits until they end, and is refused after 570 s.
            ``"retract"``: they keep their tokens, wait, and go on under the new version, whose
            weights prefill prompt and tokens again; each token keeps the logprob and the version
            that it was sampled with.
        require: how many of several engines must hold all new weights before any commits, by
            default each. One that fails is left out and named in the result; if this process had
            connected to it, it does not generate until a later update heals it. ``update`` with the
            same version sends it to the engines that lack it.
        kv_scales: for an E4M3 KV cache, FP32 ``[layers, 2, KV heads of the whole model]``: scales
            of K and V, as ``KVCalibrator.scales`` returns them. They take effect with this
            version. The first rank's scales are used.
        group: the ranks that call together, by default those of the parameters' device mesh or
            of DDP. Ranks that walk an iterator without a group lead an update each.
        announce: the tensors of the first iterator for this engine: the folder of an HF
            checkpoint, or (name, dtype, shape) of each. By default those that the engine itself
            loaded; an engine of dummy weights needs it.

    Returns:
        what happened, the same on every rank.

    Raises:
        EngineError: an engine refused the update (nothing was written), or it failed.
        ManifestError: the tensors are not a valid update, for instance if a name comes twice, or
            the KV scales do not fit this engine, or ranks ask for different updates.
    """
    clock = Clock()
    if isinstance(model_or_named_tensors, Iterator):
        weights: Weights = Stream(model_or_named_tensors, announce)
    else:
        weights = WholeModel(model_or_named_tensors)
        group = group or group_of(model_or_named_tensors)
    try:
        result = _update(weights, engine, run, version, kv_scales, in_flight, require, group, clock)
    except Exception:
        KEPT.shards.forget()
        KEPT.codes.forget()
        weights.exhaust()
        raise
    finally:
        weights.close()
    weights.exhaust()
    return result


def _update(
    weights: Weights,
    engines: Any,
    run: str | None,
    version: int,
    kv_scales: torch.Tensor | None,
    in_flight: str,
    require: int | None,
    group: dist.ProcessGroup | None,
    clock: Clock,
) -> UpdateResult:
    ranks = ranks_of(weights.named, group)
    leader = Leader(ranks)

    def begin(of_ranks: list[tuple[PolicyRequest | str, Report]]) -> Transaction:
        policy = agree(ranks, [request for request, _ in of_ranks])
        participants = participants_of(engines)
        required = check_required(require, len(participants))
        named, plan = weights.named, weights.plan
        if kv_scales is not None:
            weights.add(KV_SCALES, kv_scales)
        return Transaction(participants, named, plan, policy, in_flight, required)

    def digests() -> list[str] | None:
        """Of what each rank holds, on the leader."""
        return leader.collect(weights.digest(), PRESENCE_S)

    transaction: Any = None
    try:
        request = leader.each(ask, partial(weights.check, ranks), RUN, run, version, in_flight)
        of_ranks = leader.collect((request, weights.report(leader.size)))
        reports = None if of_ranks is None else [report for _, report in of_ranks]
        leader.attempt(_check_alike, reports)
        weights.assemble(leader, reports)
        transaction = leader.attempt(begin, of_ranks)
        begun: Any = leader.share(transaction and transaction.begun())
        policy: Policy = begun.policy
        if begun.is_second_try:
            leader.attempt(Transaction.check_same, transaction, digests())
            leader.share(None)
        clock.lap("begin")
        if begun.committed_before:
            leader.attempt(Transaction.end, transaction)
            return UpdateResult(*policy, 0, 0, 0, clock.seconds(), None, failed=begun.failed)
        weights.send(leader, transaction, begun, clock)
        gpu_seconds = leader.attempt(Transaction.finish, transaction)
        if any(map(any, begun.mapped)):
            _close_failed(transaction, leader)
            # a rank that has left may have changed its shards while engines read them
            leader.share(None)
            leader.collect(None, PRESENCE_S)
        clock.lap("write")
        leader.attempt(Transaction.commit, transaction)
        _close_failed(transaction, leader)
        sent = transaction and (transaction.sent, gpu_seconds, transaction.failed)
        try:
            outcome = leader.share((sent, weights.codes_wanted, KEPT.opened()))
            (sent, gpu_seconds, failed), codes, open_seeds = outcome
        except MissedCommitError:
            leader.attempt(Transaction.remember, transaction, digests())
            raise
        if failed:
            leader.attempt(Transaction.remember, transaction, digests())
        weights.committed(codes, open_seeds)
        clock.lap("commit")
    except BaseException as error:
        try:
            if transaction is not None:
                transaction.close(error)
        finally:
            leader.tell(error)
        raise
    tensors, nbytes, mapped, network = sent
    seconds = clock.seconds()
    return UpdateResult(*policy, tensors, nbytes, mapped, seconds, gpu_seconds, network, failed)


def _check_alike(reports: list[Report]) -> None:
    """Raise where some ranks stream and others do not: each would wait for what never comes."""
    streams = [report is None for report in reports]
    if len(set(streams)) > 1:
        raise ManifestError(
            f"of the ranks that update, {streams.count(True)} pass an iterator and "
            f"{streams.count(False)} a model or a mapping; pass the same kind on all"
        )


def _close_failed(transaction: Transaction | None, leader: Leader) -> None:
    """Before other ranks hear of a failure and go on: engines may read their GPUs."""
    if transaction is not None and leader.error is not None:
        transaction.close(leader.error)


def ask(
    check: Callable[[], None], own_run: str, run: Any, version: Any, in_flight: Any = ABORT
) -> PolicyRequest:
    """Checked before an engine is told of anything.

    Args:
        check: raises what is wrong with the weights on this rank.
        own_run: of this process.

    Raises:
        ManifestError: the policy is invalid.
    """
    check()
    policy = check_policy(own_run if run is None else run, as_python(version))
    return PolicyRequest(policy, check_in_flight(in_flight), run is not None)


def agree(ranks: tuple[int, ...], requests: list[PolicyRequest | str]) -> Policy:
    """The policy that all ranks ask for.

    Args:
        requests: of each of them; of one that cannot go on, why.

    Raises:
        ManifestError: a rank cannot, or asks for another policy.
    """
    first, *others = requests
    assert isinstance(first, PolicyRequest)
    for rank, other in zip(ranks[1:], others, strict=True):
        if isinstance(other, str):
            raise ManifestError(other)
        run = other.policy.run if other.names_run else first.policy.run
        policy = other.policy._replace(run=run)
        if (policy, other.in_flight) != (first.policy, first.in_flight):
            raise ManifestError(
                f"on rank {rank}: the update is to {policy} with in_flight={other.in_flight!r}, "
                f"but on the first rank to {first.policy} with in_flight={first.in_flight!r}; "
                f"pass the same on all ranks"
            )
    return first.policy
