"""Weights into a stock engine on other GPUs, over SGLang's ``update_weights_from_distributed``."""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.engines.weights import Named

HOST = "127.0.0.1"
GROUP = "fp8rl-benchmark"
JOIN = timedelta(seconds=60)


class BroadcastGroup:
    """One rank of the trainer and all ranks of an engine.

    Each call to torch runs beside the request to the engine: NCCL connects in the first broadcast,
    and leaves the group, only when all ranks do.
    """

    def __init__(self, engine: Any, ranks: int, backend: str) -> None:
        from sglang.srt.utils.common import init_custom_process_group

        self._engine = engine
        self._beside = ThreadPoolExecutor(1)
        with socket.create_server((HOST, 0)) as free:
            port = free.getsockname()[1]
        place = {"world_size": ranks + 1, "group_name": GROUP, "backend": backend}

        def join() -> Any:
            return init_custom_process_group(
                init_method=f"tcp://{HOST}:{port}", rank=0, timeout=JOIN, **place
            )

        self._group = self._both(
            join,
            lambda: engine.init_weights_update_group(HOST, port, rank_offset=1, **place),
            "to join a group",
        )

    def send(self, named: Named, last: bool, update: str) -> None:
        """Broadcast one flattened bucket, which the engine loads, in a ``stock_push.session``; see
        ``stock_push.send_payloads``."""
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        flat = FlattenedTensorBucket(named_tensors=named).get_flattened_tensor()

        def broadcast() -> None:
            if flat.is_cuda:  # a thread begins on the first GPU
                torch.cuda.set_device(flat.device)
            dist.broadcast(flat, src=0, group=self._group)
            if flat.is_cuda:
                torch.cuda.current_stream().synchronize()

        self._both(
            broadcast,
            lambda: self._engine.update_weights_from_distributed(
                [name for name, _ in named],
                [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
                [list(tensor.shape) for _, tensor in named],
                group_name=GROUP,
                flush_cache=last,
                load_format="flattened_bucket",
            ),
            update,
        )

    def close(self) -> None:
        """Leave the group, as the engine does."""
        self._both(
            lambda: dist.destroy_process_group(self._group),
            lambda: self._engine.destroy_weights_update_group(GROUP),
            "to leave a group",
        )
        self._beside.shutdown()

    def _both(
        self, ours: Callable[[], Any], theirs: Callable[[], tuple[bool, str]], what: str
    ) -> Any:
        """Do ours in a thread; the engine is asked from this one, whose event loop it has."""
        doing = self._beside.submit(ours)
        done, message = theirs()
        if not done:
            self._beside.shutdown(wait=False)
            raise RuntimeError(f"the engine refused {what}: {message}")
        return doing.result()
