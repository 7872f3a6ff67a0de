"""The hook on SGLang's scheduler that answers our control messages, updates among them.

Every rank runs the same hook at the same step of its event loop, so ranks decide together.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sgl_fp8rl.engine.compat.settings import resolved
from sgl_fp8rl.engine.control import export
from sgl_fp8rl.engine.control.attached import scheduler_weights
from sgl_fp8rl.engine.control.host import SchedulerHost, answer
from sgl_fp8rl.engine.control.memory_release import is_idle
from sgl_fp8rl.engine.control.tied_head import tied_shape
from sgl_fp8rl.engine.layers import routed_experts
from sgl_fp8rl.engine.layers.quant_config import list_layers
from sgl_fp8rl.protocol.cuda_memory import gpu_uuid, visible_gpus
from sgl_fp8rl.protocol.values import excerpt
from sgl_fp8rl.receiver import code_sums, update_steps
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from sgl_fp8rl.receiver.kv import kv_stats, quant_error
from sgl_fp8rl.receiver.kv.scales import KVScales
from sgl_fp8rl.receiver.ranks import Gather, attempted, gather_results, sources

RPC_METHOD = "fp8rl"
READS_MEMORY = ("code_sums", "digest", "export", "kv", "kv_observe", "kv_recalibrate")
"""Messages whose answer lies in memory that the memory saver takes away with the weights."""
RELEASED = "the weights' memory is released; resume_memory_occupation first"
Reply = dict[str, Any]


@dataclass(frozen=True)
class ControlRequest:
    """A message, and the rank that is to answer it."""

    scheduler: Any
    weights: EngineWeights
    message: dict[str, Any]

    @property
    def host(self) -> SchedulerHost:
        return SchedulerHost(self.scheduler)

    @property
    def gather(self) -> Gather:
        """Over the ranks of the engine."""
        return self.host.gather


def handle_rpc(original: Any, scheduler: Any, request: Any) -> Any:
    """AROUND ``Scheduler.handle_rpc_request``: answer our JSON messages."""
    if request.method != RPC_METHOD:
        return original(scheduler, request)
    weights = scheduler_weights(scheduler)
    if weights is None:
        return answer({"error": "this engine does not run with --quantization fp8rl"})
    # an exception here would end the server
    try:
        message = json.loads(request.parameters["message"])
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        return answer({"error": f"the control message cannot be read: {error}"})
    op = message.get("op") if isinstance(message, dict) else None
    read = ANSWERS.get(op) if isinstance(op, str) else None
    if read is None:
        return answer({"error": unknown(op)})
    if weights.released and op in READS_MEMORY:
        return answer({"error": RELEASED})
    run = partial(read, ControlRequest(scheduler, weights, message))
    # an update fails as a whole, on all ranks, or leaves them unlike each other
    reply, fault = (run(), None) if op == "begin" else attempted(run, f"control message {op}")
    return answer({"error": fault} if reply is None else reply)


def unknown(op: Any) -> str:
    """What is said of a message that nothing answers."""
    return f"control message {excerpt(op)} is unknown; install the same sgl-fp8rl on both sides"


def _begin(request: ControlRequest) -> Reply:
    """Run an update; the main process hears of its beginning by a reply of its own."""
    return update_steps.run(request.host, request.weights, request.message)


def _idle(request: ControlRequest) -> Reply:
    scheduler = request.scheduler
    idle = all(gather_results(partial(is_idle, scheduler), "a look", request.gather))
    return {"idle": idle, "paused": bool(scheduler._engine_paused)}


def _layers(request: ControlRequest) -> Reply:
    return {"layers": [asdict(layer) for layer in list_layers(request.weights.model)]}


def _digest(request: ControlRequest) -> Reply:
    """SHA-256 and address of every parameter, buffer and tensor derived from a parameter: what two
    equal engines agree in."""
    read = partial(_digest_of_rank, request.weights)
    return {"ranks": gather_results(read, "a digest", request.gather)}


def _digest_of_rank(weights: EngineWeights) -> Reply:
    model, derived = weights.model, weights.derived.tensors()
    return {
        name: {
            "sha256": hashlib.sha256(_bytes(tensor)).hexdigest(),
            "address": tensor.data_ptr(),
            "dtype": str(tensor.dtype),
            "shape": list(tensor.shape),
        }
        for name, tensor in (*model.named_parameters(), *model.named_buffers(), *derived.items())
    }


def _code_sums(request: ControlRequest) -> Reply:
    return code_sums.read(request.weights, request.gather)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _export_layout(request: ControlRequest) -> Reply:
    return export.export_layout(request.weights, request.message, request.gather)


def _export(request: ControlRequest) -> Reply:
    """Write the committed weights; nothing is generated meanwhile."""
    scheduler = request.scheduler
    if not all(gather_results(scheduler.is_fully_idle, "a look", request.gather)):
        return {"error": "requests are running; export when they have ended", "busy": True}
    written = export.write(request.weights, request.message.get("folder"), request.host)
    settings = resolved(scheduler.server_args)
    path = settings.model_path
    # of a folder the whole path: who asks may be in another one
    path = str(Path(path).resolve()) if Path(path).is_dir() else path
    model = {"model": path, "revision": settings.revision}
    return {**written, **model, **request.weights.status}


def _kv(request: ControlRequest) -> Reply:
    kv = request.weights.kv
    if kv is None:
        return {"error": kv_stats.NOT_QUANTIZED}
    read = partial(kv_stats.of_rank, kv)
    return kv_stats.report(kv, gather_results(read, "statistics of the KV cache", request.gather))


def _kv_observe(request: ControlRequest) -> Reply:
    kv = request.weights.kv
    if kv is None:
        return {"error": kv_stats.NOT_QUANTIZED}
    start = partial(quant_error.start, kv)
    return {"tokens": gather_results(start, "observing the KV cache", request.gather)[0]}


def _kv_recalibrate(request: ControlRequest) -> Reply:
    """Let the next prefill measure the KV scales again: nothing stored under the old ones stays."""
    kv = request.weights.kv
    if not isinstance(kv, KVScales):
        return {"error": "this engine's KV cache has no scales that are measured"}
    idle = gather_results(request.host.make_idle, "emptying the KV cache", request.gather)
    if not all(idle):
        return {"error": "requests are running; recalibrate when they have ended", "busy": True}
    kv.recalibrate()
    return {"pending": True}


def _tensors(request: ControlRequest) -> Reply:
    """The HF tensors of a complete update; None before the first one to dummy weights."""
    table = request.weights.table
    return {"shapes": None if table is None else {n: list(s) for n, s in table.sources.items()}}


def _status(request: ControlRequest) -> Reply:
    """What a rollout needs: each one asks, so it names no tensors, and needs no other rank but for
    what an FP8 KV cache clipped."""
    weights = request.weights
    clipped = None
    if isinstance(weights.kv, KVScales) and not weights.released:
        read = partial(kv_stats.clipped_share, weights.kv)
        clipped = max(gather_results(read, "what the KV cache clipped", request.gather))
    experts = routed_experts.layout(weights.model)
    return {"routed_experts": experts, "kv_clipped": clipped, **weights.status}


def _layout(request: ControlRequest) -> Reply:
    weights, gather = request.weights, request.gather
    seen = gather_results(partial(_gpus, weights.device), "a layout", gather)
    return {
        "dtype": str(weights.dtype).removeprefix("torch."),
        **sources(weights.table, gather),
        "skipped": [] if weights.table is None else sorted(weights.table.skipped),
        "tied": tied_shape(weights),
        "gpus": [uuid for uuid, _ in seen if uuid],
        "visible_gpus": sorted(set.intersection(*(others for _, others in seen))),
        "kv_cache": kv_stats.layout(weights.kv),
        **_status(request),
    }


def _gpus(device: torch.device) -> tuple[str, set[str]]:
    """The UUID of a rank's GPU, and of all whose memory it can map; none on a CPU."""
    return (gpu_uuid(device.index), visible_gpus()) if device.type == "cuda" else ("", set())


ANSWERS: dict[str, Callable[[ControlRequest], Reply]] = {
    "begin": _begin,
    "idle": _idle,
    "layers": _layers,
    "digest": _digest,
    "code_sums": _code_sums,
    "export_layout": _export_layout,
    "export": _export,
    "kv": _kv,
    "kv_observe": _kv_observe,
    "kv_recalibrate": _kv_recalibrate,
    "tensors": _tensors,
    "status": _status,
    "layout": _layout,
}
