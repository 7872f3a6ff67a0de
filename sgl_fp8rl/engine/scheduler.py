"""Hooks on SGLang's scheduler: our control messages, the quarantine, and versions of tokens.

Every rank runs the same hook at the same step of its event loop, so ranks decide together.
"""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from http import HTTPStatus
from typing import Any

import torch
import torch.distributed as dist

from sgl_fp8rl import compat
from sgl_fp8rl.engine import routed_experts
from sgl_fp8rl.engine.internal_requests import isolate_prefix
from sgl_fp8rl.engine.quant_config import list_layers
from sgl_fp8rl.engine.retraction import refuse, refuse_waiting, retract
from sgl_fp8rl.kv_cache import kv_stats
from sgl_fp8rl.options import current_options
from sgl_fp8rl.protocol.cuda_memory import gpu_uuid
from sgl_fp8rl.protocol.manifest import (
    Manifest,
    ManifestError,
    check_version,
)
from sgl_fp8rl.protocol.states import FINISH, RETRACT, State
from sgl_fp8rl.weight_update.rank_server import RankSocket, reply, serve
from sgl_fp8rl.weight_update.session import EngineWeights

logger = logging.getLogger(__name__)

RPC_METHOD = "fp8rl"
VERSION_KEY = "policy_version"
"""Where ``meta_info`` of a response carries the policy version of each output token."""
PAUSED = (
    "generation is paused, so requests in flight cannot finish; continue_generation first, or "
    "update with in_flight='retract'"
)
READS_MEMORY = ("digest", "kv", "kv_observe", "kv_recalibrate")
"""Messages whose answer lies in memory that the memory saver takes away with the weights."""
RELEASED = "the weights' memory is released; resume_memory_occupation first"
WEIGHTS_TAG = "weights"
"""SGLang's memory-saver tag of the weights."""
_ATTRIBUTE = "_fp8rl_weights"


def attach(model: torch.nn.Module, weights: EngineWeights) -> None:
    """Keep a model's update state beside it."""
    object.__setattr__(model, _ATTRIBUTE, weights)


def weights_of(model: torch.nn.Module) -> EngineWeights | None:
    """The update state of a model, or None where fp8rl does not serve it."""
    return getattr(model, _ATTRIBUTE, None)


def _scheduler_weights(scheduler: Any) -> EngineWeights | None:
    return weights_of(scheduler.tp_worker.model_runner.model)


def gather(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """The value of every rank of the tensor-parallel group, in rank order."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def handle_rpc(original: Any, scheduler: Any, request: Any) -> Any:
    """AROUND ``Scheduler.handle_rpc_request``: answer our JSON messages."""
    if request.method != RPC_METHOD:
        return original(scheduler, request)
    weights = _scheduler_weights(scheduler)
    if weights is None:
        return _answer({"error": "this engine does not run with --quantization fp8rl"})
    message = json.loads(request.parameters["message"])
    if message["op"] == "begin":
        return _begin(scheduler, weights, message)
    group = scheduler.tp_group.cpu_group
    if weights.released and message["op"] in READS_MEMORY:
        return _answer({"error": RELEASED})
    if message["op"] == "layers":
        return _answer({"layers": [asdict(layer) for layer in list_layers(weights.model)]})
    if message["op"] == "digest":
        return _answer({"ranks": gather(_digest(weights.model), group)})
    if message["op"] == "kv":
        return _answer(kv_stats.read(weights.kv, group))
    if message["op"] == "kv_observe":
        return _answer(kv_stats.start_observing(weights.kv))
    if message["op"] == "kv_recalibrate":
        return _answer(_recalibrate(scheduler, weights, group))
    return _answer(_layout(weights, group))


def _answer(reply_: dict[str, Any]) -> Any:
    return compat.RpcReqOutput(success="error" not in reply_, message=json.dumps(reply_))


def _status(weights: EngineWeights) -> dict[str, Any]:
    return {
        "version": weights.version,
        "state": weights.state.value,
        "reason": weights.reason,
    }


def _layout(weights: EngineWeights, group: dist.ProcessGroup) -> dict[str, Any]:
    on_gpu = weights.device.type == "cuda"
    return {
        "dtype": str(weights.dtype).removeprefix("torch."),
        "fallback": sorted(weights.table.fallback) if weights.table else [],
        "fp32": weights.table.kept_in(torch.float32) if weights.table else [],
        "formats": weights.table.by_format() if weights.table else {},
        "gpus": gather(gpu_uuid(weights.device.index), group) if on_gpu else [],
        "kv_cache": kv_stats.layout(weights.kv),
        "routed_experts": routed_experts.layout(weights.model),
        **_status(weights),
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


def _prepare(weights: EngineWeights, message: dict[str, Any], group: dist.ProcessGroup) -> str:
    """Check an update against this engine and return the fingerprint of its manifest.

    Every rank takes the same way through here, since ranks know the same manifests.

    Raises:
        ManifestError: it must not begin, on this rank or on another.
    """
    version = check_version(message.get("version"))
    manifest, error = None, None
    recorded_before = weights.table is not None
    try:
        weights.check_version(version)
        if "manifest" not in message:
            return str(message.get("fingerprint"))
        manifest = Manifest.from_json(message["manifest"])
        weights.accept(manifest)
    except Exception as fault:  # whatever it is, the other ranks wait for this one's word
        if not isinstance(fault, ManifestError):
            logger.exception("an update to version %d could not be planned", version)
        error = str(fault) or type(fault).__name__
    errors = [e for e in gather(error, group) if e is not None]
    if not errors:
        errors = _unrouted(weights, group)
    if errors or manifest is None:
        if manifest is not None:
            weights.forget(manifest.fingerprint)
        if not recorded_before:
            weights.table = None  # recorded from this manifest, so it must not outlive it
        raise ManifestError(errors[0])
    return manifest.fingerprint


def _unrouted(weights: EngineWeights, group: dist.ProcessGroup) -> list[str]:
    """Names that no rank keeps: known of a checkpoint, unknown in a first update."""
    assert weights.table is not None
    unrouted = skipped_by_all(weights, group) - weights.table.skipped
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
        fingerprint = _prepare(weights, message, group)
    except ManifestError as refusal:
        return _answer({"error": str(refusal)})
    if not all(gather(weights.knows(fingerprint), group)):
        return _answer({"unknown": True})
    retracts = message.get("in_flight") == RETRACT
    # what retracts is idle when it must be: nothing is disturbed before all is ready to begin
    idle = retracts or (scheduler.is_fully_idle() and scheduler.flush_cache(empty_cache=False))
    rank_socket, failure = None, None
    if idle:
        try:
            rank_socket = RankSocket(dist.get_rank(group))
        except OSError as error:
            failure = (
                f"the engine cannot open a socket in its temporary folder: {error}; set TMPDIR"
            )
    elif message.get("in_flight") == FINISH and scheduler._engine_paused:
        failure = PAUSED
    path = str(rank_socket.path) if rank_socket is not None else ""
    ranks = gather(_Ready(error=failure, idle=bool(idle), path=path), group)
    errors = [rank.error for rank in ranks if rank.error is not None]
    if rank_socket is None or errors or not all(rank.idle for rank in ranks):
        if rank_socket is not None:
            rank_socket.close()
        return _answer({"error": errors[0]} if errors else {"busy": True})
    try:
        if retracts and not all(gather(retract(scheduler), group)):
            return _answer({"busy": True})
        session = weights.begin(fingerprint, message["version"])
        if scheduler.ipc_channels.recv_from_rpc is not None:
            begun = _answer({"sockets": [rank.path for rank in ranks]})
            compat.sock_send(scheduler.ipc_channels.recv_from_rpc, begun)
        silence_s = current_options().session_timeout_s
        outcome, peer = serve(rank_socket, session, message["token"], silence_s)
    finally:
        rank_socket.close()
    outcomes = gather(outcome, group)
    failed = next((o for o in outcomes if not o.committed), None)
    if failed is None:
        weights.commit()
        reply(peer, {"ok": True})
    elif any(o.dirty for o in outcomes):
        weights.quarantine(
            f"the update to version {session.version} failed: {failed.reason}; a complete update "
            f"to a newer version heals the engine"
        )
        refuse_waiting(scheduler, *_refusal(weights))
        reply(peer, {"error": failed.reason})
    else:
        weights.resume()
        reply(peer, {"error": failed.reason})
    return _answer(
        {"ended": failed is None, "failure": failed and failed.reason, **_status(weights)}
    )


def refuse_generation(original: Any, scheduler: Any, request: Any, **kwargs: Any) -> None:
    """AROUND ``handle_generate_request`` and its like: only a committed version generates."""
    weights = _scheduler_weights(scheduler)
    if weights is None or weights.state is State.SERVING:
        if weights is not None and weights.kv is not None:
            isolate_prefix(request)
        original(scheduler, request, **kwargs)
        return
    refuse(scheduler, request, *_refusal(weights))


def _refusal(weights: EngineWeights) -> tuple[str, int]:
    """Why no policy generates, and the HTTP status that says so."""
    return f"engine weights are quarantined: {weights.reason}", HTTPStatus.SERVICE_UNAVAILABLE


def quarantine_released(original: Any, updater: Any, request: Any) -> Any:
    """AROUND ``release_memory_occupation``: released weights are lost, so none may be sampled."""
    output = original(updater, request)
    weights = weights_of(updater.tp_worker.model_runner.model)
    if weights is not None and WEIGHTS_TAG in updater.offload_tags:
        weights.released = True
        weights.quarantine("the weights' memory was released; resume it and send a complete update")
    return output


def note_resumed(original: Any, updater: Any, request: Any) -> Any:
    """AROUND ``resume_memory_occupation``: there is memory to update again, still quarantined."""
    output = original(updater, request)
    weights = weights_of(updater.tp_worker.model_runner.model)
    if weights is not None:
        weights.released = WEIGHTS_TAG in updater.offload_tags
    return output


def stamp_version(original: Any, runner: Any, logits_output: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``ModelRunner.sample``: each sampled token carries the version that sampled it."""
    token_ids = original(runner, logits_output, *args, **kwargs)
    weights = weights_of(runner.model)
    if weights is not None:
        versions = [weights.version] * len(token_ids)
        logits_output.customized_info = {
            **(logits_output.customized_info or {}),
            VERSION_KEY: versions,
        }
    return token_ids


def refuse_stock_update(output_class: str) -> Any:
    """Make the AROUND hook of one of SGLang's own weight updates.

    It would cast BF16 into FP8 storage without scales, and says nothing of versions.
    """

    def hook(original: Any, updater: Any, request: Any) -> Any:
        if weights_of(updater.tp_worker.model_runner.model) is None:
            return original(updater, request)
        return getattr(compat, output_class)(
            success=False,
            message="this engine runs with --quantization fp8rl, whose weights change through "
            "trainer_bridge.update(model, engine, version=...)",
        )

    return hook
