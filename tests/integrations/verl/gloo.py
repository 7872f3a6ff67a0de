"""A checkpoint engine of verl for CPUs, which verl lacks: buckets over gloo.

``checkpoint_engine.custom_backend_module`` names this module, and ``backend=gloo`` chooses it. As
``nccl`` does, it makes a group of the first trainer rank and all rollout workers, sends tensors cut
into buckets, and hands out views of a bucket that the next one overwrites.
"""

import asyncio
import pickle
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import (
    CheckpointEngine,
    CheckpointEngineRegistry,
    TensorMeta,
    merge_weight_chunks,
    split_weight_chunks,
)

BACKEND = "gloo"
TIMEOUT_S = 60.0
"""For one bucket, most of which is the gathering of its tensors."""


@CheckpointEngineRegistry.register(BACKEND)
class GlooCheckpointEngine(CheckpointEngine):
    """One in each trainer rank and each rollout worker.

    Args:
        bucket_size: verl's, whole MiB.
        bucket_bytes: in its place, if not 0.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, bucket_bytes: int = 0) -> None:
        self._size = bucket_bytes or bucket_size
        self._is_master = is_master
        self._bucket = torch.empty(0)
        self._store: Any = None
        self._group: Any = None

    def prepare(self) -> tuple[str, int] | None:
        """Where the ranks of the next group meet; of the master."""
        self._bucket = torch.zeros(self._size, dtype=torch.uint8)
        if not self._is_master:
            return None
        host = ray.util.get_node_ip_address()
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        size = 1 + rollout_world_size
        ranks = [0] + [-1] * (actor_wg_world_size - 1), list(range(1, size))
        actors, rollouts = (
            {"rank": r, "size": [size] * len(r), "place": [metadata[0]] * len(r)} for r in ranks
        )
        return actors, rollouts

    def init_process_group(self, rank: int, size: int, place: tuple[str, int]) -> None:
        if rank < 0:
            return
        store = self._store if rank == 0 else dist.TCPStore(*place, is_master=False)
        # beside the process's own group, which torch.distributed has one of
        self._group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=TIMEOUT_S))

    def finalize(self) -> None:
        self._group = self._store = None

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        if self._group is None:  # of the trainer's other ranks, which gather
            for _ in weights:
                pass
            return
        try:
            metas: list[TensorMeta] = []
            used = 0
            async for meta, chunk in split_weight_chunks(weights, self._size):
                if used + meta.chunk_size > self._size:
                    await asyncio.to_thread(self._exchange, (metas, False))
                    metas, used = [], 0
                self._bucket[used : used + meta.chunk_size] = chunk
                meta.offset = used
                metas.append(meta)
                used += meta.chunk_size
            await asyncio.to_thread(self._exchange, (metas, True))
        except BaseException:
            self.finalize()  # the others see their connection closed
            raise

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        async for pair in merge_weight_chunks(self._chunks(), self._size):
            yield pair

    async def _chunks(self) -> AsyncIterator[tuple[TensorMeta, torch.Tensor]]:
        is_last = False
        while not is_last:
            metas, is_last = await asyncio.to_thread(self._exchange, None)
            for meta in metas:
                yield meta, self._bucket[meta.offset : meta.offset + meta.chunk_size]

    def _exchange(self, content: tuple[list[TensorMeta], bool] | None) -> Any:
        """Send a bucket and what is in it, or receive both; what is in it."""
        message = bytearray(pickle.dumps(content))
        length = torch.tensor([len(message)])
        self._broadcast(length)
        text = torch.empty(int(length), dtype=torch.uint8)
        if content is not None:
            text = torch.frombuffer(message, dtype=torch.uint8)
        self._broadcast(text)
        self._broadcast(self._bucket)
        return pickle.loads(text.numpy().tobytes())

    def _broadcast(self, tensor: torch.Tensor) -> None:
        self._group.broadcast(tensor, 0).wait()
