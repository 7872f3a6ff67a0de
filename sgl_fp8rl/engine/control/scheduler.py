"""The hook on SGLang's scheduler that answers our control messages, updates among them.

Every rank runs the same hook at the same step of its event loop, so ranks decide together.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.control.attached import scheduler_weights
from sgl_fp8rl.engine.control.host import SchedulerHost, answer
from sgl_fp8rl.engine.control.memory_release import is_idle
from sgl_fp8rl.engine.layers import routed_experts
from sgl_fp8rl.engine.layers.quant_config import list_layers
from sgl_fp8rl.protocol.cuda_memory import gpu_uuid, visible_gpus
from sgl_fp8rl.protocol.manifest import TIED_HEAD, Manifest
from sgl_fp8rl.protocol.values import excerpt
from sgl_fp8rl.receiver import code_sums, update_steps
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from sgl_fp8rl.receiver.kv import kv_stats
from sgl_fp8rl.receiver.kv.scales import KVScales
from sgl_fp8rl.receiver.routes.route_tracer import record_routes
from sgl_fp8rl.receiver.routes.routes import shapes_of
from sgl_fp8rl.receiver.update_steps import Gather, attempted, gather_results, merged

RPC_METHOD = "fp8rl"
READS_MEMORY = ("code_sums", "digest", "kv", "kv_recalibrate")
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


def _idle(request: ControlRequest) -> Reply:
    scheduler = request.scheduler
    idle = all(gather_results(partial(is_idle, scheduler), "a look", request.gather))
    return {"idle": idle, "paused": bool(scheduler._engine_paused)}


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


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _export_layout(request: ControlRequest) -> Reply:
    """How an engine that has loaded nothing would keep the tensors of a manifest."""
    weights = request.weights
    if weights.table is not None:
        return {"error": "the engine has loaded weights; ask one with --load-format dummy"}

    def names() -> dict[str, Any]:
        manifest = Manifest.from_json(request.message.get("manifest"))
        return record_routes(weights.model, shapes_of(manifest)).names

    dtype = str(weights.dtype).removeprefix("torch.")
    return {"dtype": dtype, **merged(gather_results(names, "an export", request.gather))}


def _kv(request: ControlRequest) -> Reply:
    kv = request.weights.kv
    if kv is None:
        return {"error": kv_stats.NOT_QUANTIZED}
    read = partial(kv_stats.of_rank, kv)
    return kv_stats.report(kv, gather_results(read, "statistics of the KV cache", request.gather))


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
        **merged(gather(weights.table.names if weights.table else None)),
        "skipped": [] if weights.table is None else sorted(weights.table.skipped),
        "tied": _tied_shape(weights),
        "gpus": [uuid for uuid, _ in seen if uuid],
        "visible_gpus": sorted(set.intersection(*(others for _, others in seen))),
        "kv_cache": kv_stats.layout(weights.kv),
        **_status(request),
    }


def _tied_shape(weights: EngineWeights) -> list[int] | None:
    """The shape of the embedding in a checkpoint, ``[V, H]``, where the model computes its logits
    with it; None where an update brings a head of its own."""
    model, table = weights.model, weights.table
    if table is not None and table.routes.get(TIED_HEAD):
        return None
    embeddings = [m for m in model.modules() if isinstance(m, compat.Embedding)]
    named = dict(model.named_parameters(remove_duplicate=False))
    head = named.get(TIED_HEAD)
    if head is None:
        config = getattr(weights.model, "config", None)
        configs = config, getattr(config, "text_config", None)
        if not any(getattr(each, "tie_word_embeddings", False) for each in configs):
            return None
    else:
        shared = [name for name, p in named.items() if p.data_ptr() == head.data_ptr()]
        if len(shared) < 2:
            return None
        embeddings = [m for m in embeddings if m.weight.data_ptr() == head.data_ptr()]
    if not embeddings:
        return None
    # a vision tower may have one of its own, of positions
    embedding = max(embeddings, key=lambda each: each.org_vocab_size)
    return [embedding.org_vocab_size, embedding.embedding_dim]


def _gpus(device: torch.device) -> tuple[str, set[str]]:
    """The UUID of a rank's GPU, and of all whose memory it can map; none on a CPU."""
    return (gpu_uuid(device.index), visible_gpus()) if device.type == "cuda" else ("", set())


ANSWERS: dict[str, Callable[[ControlRequest], Reply]] = {
    # the main process hears of an update's beginning by a reply of its own
    "begin": lambda asked: update_steps.run(asked.host, asked.weights, asked.message),
    "idle": _idle,
    "layers": lambda asked: {"layers": [asdict(each) for each in list_layers(asked.weights.model)]},
    "digest": _digest,
    "code_sums": lambda asked: code_sums.read(asked.weights, asked.gather),
    "export_layout": _export_layout,
    "kv": _kv,
    "kv_recalibrate": _kv_recalibrate,
    "tensors": _tensors,
    "status": _status,
    "layout": _layout,
}
