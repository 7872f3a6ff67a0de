"""Weights into a stock engine on other GPUs, over SGLang's ``update_weights_from_distributed``."""

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.distributed as dist

from benchmarks.engines.weights import Named

HOST = "127.0.0.1"
GROUP = "fp8rl-benchmark"


class BroadcastGroup:
    """One rank of the trainer and all ranks of an engine.

    Args:
        ranks: of the engine.
        backend: of torch.distributed.

    Raises:
        RuntimeError: the engine does not join.
    """

    def __init__(self, engine: Any, ranks: int, backend: str) -> None:
        from sglang.srt.utils.common import init_custom_process_group

        self._engine = engine
        with socket.create_server((HOST, 0)) as free:
            port = free.getsockname()[1]
        place = {"world_size": ranks + 1, "group_name": GROUP, "backend": backend}
        # both sides wait for each other
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(
                init_custom_process_group, init_method=f"tcp://{HOST}:{port}", rank=0, **place
            )
            done, message = engine.init_weights_update_group(HOST, port, rank_offset=1, **place)
            if not done:
                raise RuntimeError(f"the engine did not join the group: {message}")
            self._group = joined.result()

    def send(self, named: Named, last: bool, update: str) -> None:
        """Broadcast one flattened bucket, which the engine loads.

        Args:
            last: whether the prefix cache is to be flushed.
            update: what an error calls it.

        Raises:
            RuntimeError: the engine refused it.
        """
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        flat = FlattenedTensorBucket(named_tensors=named).get_flattened_tensor()
        sent = dist.broadcast(flat, src=0, group=self._group, async_op=True)
        done, message = self._engine.update_weights_from_distributed(
            [name for name, _ in named],
            [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
            [list(tensor.shape) for _, tensor in named],
            group_name=GROUP,
            flush_cache=last,
            load_format="flattened_bucket",
        )
        sent.wait()
        if not done:
            raise RuntimeError(f"the engine refused {update}: {message}")
