"""The hook on SGLang's scheduler that answers our control messages, updates among them.

Every rank runs the same hook at the same step of its event loop, so ranks decide together.
"""

import hashlib
import json
import logging
import socket
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from sgl_fp8rl import compat
from sgl_fp8rl.engine import export, routed_experts
from sgl_fp8rl.engine.attached import scheduler_weights
from sgl_fp8rl.engine.embedding_cache import forget_embeddings
from sgl_fp8rl.engine.guards import refusal
from sgl_fp8rl.engine.memory_release import is_idle
from sgl_fp8rl.engine.quant_config import list_layers
from sgl_fp8rl.engine.ranks import attempted, gather, sources
from sgl_fp8rl.engine.retraction import outlasts_abort, refuse_waiting, retract
from sgl_fp8rl.kv_cache import kv_stats
from sgl_fp8rl.protocol.cuda_memory import gpu_uuid
from sgl_fp8rl.protocol.manifest import Manifest, ManifestError
from sgl_fp8rl.protocol.policy import Policy, check_policy
from sgl_fp8rl.protocol.states import FINISH, RETRACT
from sgl_fp8rl.protocol.values import excerpt
from sgl_fp8rl.weight_update.rank_server import Outcome, RankSocket, committed, reply, serve
from sgl_fp8rl.weight_update.session import EngineWeights

logger = logging.getLogger(__name__)

RPC_METHOD = "fp8rl"
PAUSED = (
    "generation is paused, so requests in flight cannot end; continue_generation first, or "
    "update with in_flight='retract'"
)
READS_MEMORY = ("digest", "export", "kv", "kv_observe", "kv_recalibrate")
"""Messages whose answer lies in memory that the memory saver takes away with the weights."""
LONGEST_NAME = 64
"""Characters of a transaction's name."""
RELEASED = "the weights' memory is released; resume_memory_occupation first"


def handle_rpc(original: Any, scheduler: Any, request: Any) -> Any:
    """AROUND ``Scheduler.handle_rpc_request``: answer our JSON messages."""
    if request.method != RPC_METHOD:
        return original(scheduler, request)
    weights = scheduler_weights(scheduler)
    if weights is None:
        return _answer({"error": "this engine does not run with --quantization fp8rl"})
    try:
        message = json.loads(request.parameters["message"])
    except (ValueError, RecursionError) as error:  # an exception here would end the server
        return _answer({"error": f"the control message cannot be read: {error}"})
    if message["op"] == "begin":
        return _begin(scheduler, weights, message)
    group = scheduler.tp_group.cpu_group
    if weights.released and message["op"] in READS_MEMORY:
        return _answer({"error": RELEASED})
    if message["op"] == "idle":
        return _answer({"idle": all(gather(is_idle(scheduler), group))})
    if message["op"] == "layers":
        return _answer({"layers": [asdict(layer) for layer in list_layers(weights.model)]})
    if message["op"] == "digest":
        return _answer({"ranks": gather(_digest(weights.model), group)})
    if message["op"] == "export_layout":
        return _answer(export.export_layout(weights, message, group))
    if message["op"] == "export":
        return _answer(_export(scheduler, weights, message, group))
    if message["op"] == "kv":
        return _answer(kv_stats.read(weights.kv, group))
    if message["op"] == "kv_observe":
        return _answer(kv_stats.start_observing(weights.kv))
    if message["op"] == "kv_recalibrate":
        return _answer(_recalibrate(scheduler, weights, group))
    if message["op"] == "tensors":
        return _answer(_tensors(weights))
    if message["op"] == "status":
        return _answer(_describe(weights))
    return _answer(_layout(weights, group))


def _answer(reply_: dict[str, Any]) -> Any:
    return compat.RpcReqOutput(success="error" not in reply_, message=json.dumps(reply_))


def _status(weights: EngineWeights) -> dict[str, Any]:
    return {
        "run": weights.policy.run,
        "version": weights.policy.version,
        "state": weights.state.value,
        "reason": weights.reason,
    }


def _describe(weights: EngineWeights) -> dict[str, Any]:
    """What a rollout needs: each one asks, so it names no tensors and needs no other rank."""
    return {"routed_experts": routed_experts.layout(weights.model), **_status(weights)}


def _layout(weights: EngineWeights, group: dist.ProcessGroup) -> dict[str, Any]:
    on_gpu = weights.device.type == "cuda"
    return {
        "dtype": str(weights.dtype).removeprefix("torch."),
        **sources(weights.table, group),
        "gpus": gather(gpu_uuid(weights.device.index), group) if on_gpu else [],
        "kv_cache": kv_stats.layout(weights.kv),
        **_describe(weights),
    }


def _tensors(weights: EngineWeights) -> dict[str, Any]:
    """The HF tensors of a complete update; None before the first one to dummy weights."""
    table, config = weights.table, getattr(weights.model, "config", None)
    return {
        "shapes": None if table is None else {n: list(s) for n, s in table.sources.items()},
        "has_tied_head": bool(getattr(config, "tie_word_embeddings", False)),
    }


def _recalibrate(
    scheduler: Any, weights: EngineWeights, group: dist.ProcessGroup
) -> dict[str, Any]:
    """Let the next prefill measure the KV scales again: nothing stored under the old ones stays."""
    if weights.kv is None:
        return {"error": kv_stats.NO_FP8_KV}
    idle = scheduler.is_fully_idle() and scheduler.flush_cache(empty_cache=False)
    if not all(gather(bool(idle), group)):
        return {"error": "requests are running; recalibrate when they have ended", "busy": True}
    weights.kv.recalibrate()
    return {"pending": True}


def _export(
    scheduler: Any, weights: EngineWeights, message: dict[str, Any], group: dist.ProcessGroup
) -> dict[str, Any]:
    """Write the committed weights; nothing is generated meanwhile."""
    if not all(gather(bool(scheduler.is_fully_idle()), group)):
        return {"error": "requests are running; export when they have ended", "busy": True}
    written = export.write(weights, message.get("folder"), group)
    model = {"model": scheduler.server_args.model_path, "revision": scheduler.server_args.revision}
    return {**written, **model, **_status(weights)}


def _digest(model: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """SHA-256 and address of every parameter and buffer: what two equal engines agree in."""
    return {
        name: {
            "sha256": hashlib.sha256(_bytes(tensor)).hexdigest(),
            "address": tensor.data_ptr(),
            "dtype": str(tensor.dtype),
            "shape": list(tensor.shape),
        }
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


@dataclass(frozen=True)
class _Ready:
    """What one rank says before a session begins."""

    error: str | None = None
    idle: bool = False
    path: str = ""


def _prepare(
    weights: EngineWeights, policy: Policy, message: dict[str, Any], group: dist.ProcessGroup
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
        return Manifest.from_json(message["manifest"])

    manifest, error = attempted(read, f"an update to {policy}")
    if isinstance(manifest, str):
        return manifest
    if manifest is not None:
        _, error = attempted(partial(weights.accept, manifest), f"an update to {policy}")
    errors = [e for e in gather(error, group) if e is not None]
    if not errors and manifest is not None:
        errors = _unrouted(weights, group, manifest.streamed)
    if errors or manifest is None:
        if manifest is not None:
            weights.forget(manifest.fingerprint)
        if not recorded_before:
            weights.table = None  # recorded from this manifest, so it must not outlive it
        raise ManifestError(errors[0])
    return manifest.fingerprint


def _unrouted(weights: EngineWeights, group: dist.ProcessGroup, streamed: bool) -> list[str]:
    """Names that no rank keeps: known of a checkpoint, unknown in a first update."""
    assert weights.table is not None
    unrouted = skipped_by_all(weights, group) - weights.table.skipped
    if streamed:  # its names are those of a checkpoint, and need not come
        weights.table.skipped |= unrouted
        return []
    if not unrouted:
        return []
    return [
        f"the engine keeps nothing of {sorted(unrouted)[0]}; use the names of the HF checkpoint, "
        f"without the head of a tied model"
    ]


def skipped_by_all(weights: EngineWeights, group: dist.ProcessGroup) -> set[str]:
    """The HF tensors that have a route, or need the loader, on no rank."""
    table = weights.table
    assert table is not None
    mine = {n for n, routes in table.routes.items() if not routes and n not in table.fallback}
    return set.intersection(*gather(mine, group))


def _begin(scheduler: Any, weights: EngineWeights, message: dict[str, Any]) -> Any:
    group = scheduler.tp_group.cpu_group
    try:
        policy = check_policy(message.get("run"), message.get("version"))
        transaction = _transaction(message)
        if message.get("retry") and _has_committed(scheduler, weights, transaction, policy):
            return _answer({"committed": True})
        fingerprint = _prepare(weights, policy, message, group)
    except ManifestError as error:
        return _answer({"error": str(error)})
    if not all(gather(weights.knows(fingerprint), group)):
        return _answer({"unknown": True})
    rank_socket, ranks = _listen(scheduler, message, group)
    if rank_socket is None:
        errors = [rank.error for rank in ranks if rank.error is not None]
        return _answer({"error": errors[0]} if errors else {"busy": True})
    try:
        if message.get("in_flight") == RETRACT and not all(gather(retract(scheduler), group)):
            return _answer({"busy": True})
        session = weights.begin(fingerprint, policy)
        if scheduler.ipc_channels.recv_from_rpc is not None:
            begun = _answer({"sockets": [rank.path for rank in ranks]})
            compat.sock_send(scheduler.ipc_channels.recv_from_rpc, begun)
        silence_s = weights.options.session_timeout_s
        engines = message.get("engines")
        is_one_of = engines if type(engines) is int else 1
        outcome, peer = serve(rank_socket, session, message["token"], silence_s, is_one_of)
    finally:
        rank_socket.close()
    return _end(scheduler, weights, policy, transaction, outcome, peer)


def _listen(
    scheduler: Any, message: dict[str, Any], group: dist.ProcessGroup
) -> tuple[RankSocket | None, list[_Ready]]:
    """Open this rank's socket if every rank can begin, and say what each of them can."""
    in_flight = message.get("in_flight")
    # what retracts is idle when it must be: nothing is disturbed before all is ready to begin
    idle = in_flight == RETRACT or (
        scheduler.is_fully_idle() and scheduler.flush_cache(empty_cache=False)
    )
    rank_socket, failure = None, None
    if idle:
        try:
            rank_socket = RankSocket(dist.get_rank(group))
        except OSError as error:
            failure = (
                f"the engine cannot open a socket in its temporary folder: {error}; set TMPDIR"
            )
    elif scheduler._engine_paused and (in_flight == FINISH or outlasts_abort(scheduler)):
        failure = PAUSED
    path = str(rank_socket.path) if rank_socket is not None else ""
    ranks = gather(_Ready(error=failure, idle=bool(idle), path=path), group)
    if rank_socket is not None and not all(rank.idle and rank.error is None for rank in ranks):
        rank_socket.close()
        rank_socket = None
    return rank_socket, ranks


def _end(
    scheduler: Any,
    weights: EngineWeights,
    policy: Policy,
    transaction: str,
    outcome: Outcome,
    peer: socket.socket | None,
) -> Any:
    """Commit, quarantine or go on, as the ranks decide together, and tell the trainer."""
    outcomes = gather(outcome, scheduler.tp_group.cpu_group)
    failed = next((o for o in outcomes if not o.committed), None)
    if failed is None or committed(outcomes):
        weights.commit(transaction)
        if peer is None:
            weights.memory.close()  # its trainer is gone
        _after_commit(scheduler, policy)
        reply(peer, {"ok": True})
        return _answer({"ended": True, "failure": None, **_status(weights)})
    if any(o.dirty for o in outcomes):
        voted_for = transaction if all(o.voted for o in outcomes) else ""
        weights.quarantine(
            f"the update to version {policy.version} failed: {failed.reason}; a complete update "
            f"to this version or a newer one heals the engine",
            voted_for,
        )
        refuse_waiting(scheduler, *refusal(weights))
    else:
        weights.resume()
    reply(peer, {"error": failed.reason})
    return _answer({"ended": False, "failure": failed.reason, **_status(weights)})


def _transaction(message: dict[str, Any]) -> str:
    """The name that the trainer gives an update.

    Raises:
        ManifestError: it is none.
    """
    name = message.get("transaction")
    if type(name) is not str or not 0 < len(name) <= LONGEST_NAME:
        raise ManifestError(
            f"the update's transaction is {excerpt(name)}; install the same sgl-fp8rl on both sides"
        )
    return name


def _has_committed(
    scheduler: Any, weights: EngineWeights, transaction: str, policy: Policy
) -> bool:
    """Whether this engine has what its trainer decided to commit, also where it was not told."""
    if weights.committed_by(transaction, policy):
        return True
    if not all(gather(weights.is_in_doubt(transaction, policy), scheduler.tp_group.cpu_group)):
        return False
    weights.settle()
    _after_commit(scheduler, policy)
    return True


def _after_commit(scheduler: Any, policy: Policy) -> None:
    """Set the ``weight_version`` of SGLang's own replies, which 0.5.17 keeps in the main process,
    and forget what the weights before had made."""
    forget_embeddings()
    record = getattr(scheduler, "record_weight_version_change", None)
    if record is not None:
        record(str(policy.version))
