"""SGLang's scheduler as the host of updates (``receiver/host.py``)."""

import json
from http import HTTPStatus
from typing import Any

import torch.distributed as dist
from torch import nn

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.control.retraction import outlasts_abort, refuse_waiting, retract
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.states import FINISH
from sgl_fp8rl.receiver.host import gather

NO_RETRACTION = (
    "in_flight='retract' cannot reset the KV cache of an engine with --enable-hierarchical-cache, "
    "which still copies it to host memory; update with in_flight='finish' or 'abort'"
)


def answer(reply: dict[str, Any]) -> Any:
    """A reply as SGLang's schedulers send it to the main process."""
    return compat.RpcReqOutput(success="error" not in reply, message=json.dumps(reply))


def forget_embeddings() -> None:
    """Drop the embeddings of the policy before: SGLang finds them by the hash of an image alone.

    Each rank has a cache of its own. A request in flight computes its embeddings again, since it
    keeps its images until it ends.
    """
    # a global of the module that has this function, which the newer SGLang moved
    cache = compat.init_mm_embedding_cache.__globals__["embedding_cache"]
    if cache is not None:
        cache.clear()


class SchedulerHost:
    """A rank of SGLang's tensor-parallel group."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._group: dist.ProcessGroup = scheduler.tp_group.cpu_group

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    def gather(self, value: Any) -> list[Any]:
        return gather(value, self._group)

    def tell(self, reply: dict[str, Any]) -> None:
        rpc = self._scheduler.ipc_channels.recv_from_rpc
        if rpc is not None:  # of the first rank
            compat.sock_send(rpc, answer(reply))

    def make_idle(self) -> bool:
        scheduler = self._scheduler
        return bool(scheduler.is_fully_idle() and scheduler.flush_cache(empty_cache=False))

    def holds_requests(self, in_flight: object) -> bool:
        scheduler = self._scheduler
        return bool(scheduler._engine_paused) and (in_flight == FINISH or outlasts_abort(scheduler))

    def why_not_retract(self) -> str | None:
        return NO_RETRACTION if self._scheduler.enable_hierarchical_cache else None

    def retract(self) -> bool:
        return retract(self._scheduler)

    def why_not_written(self, model: nn.Module) -> str | None:
        return compat.derived_weight_error(model)

    def refuse_waiting(self, message: str) -> None:
        refuse_waiting(self._scheduler, message, HTTPStatus.SERVICE_UNAVAILABLE)

    def committed(self, policy: Policy) -> None:
        forget_embeddings()
        # 0.5.17 keeps the ``weight_version`` of its own replies in the main process
        record = getattr(self._scheduler, "record_weight_version_change", None)
        if record is not None:
            record(str(policy.version))
