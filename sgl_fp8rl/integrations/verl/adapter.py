"""verl's adapter of the rollout ``sglang``: its weights reach an fp8rl server by ``update``."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import torch
from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

import trainer_bridge
from sgl_fp8rl.integrations.verl.rollout_config import is_ours
from trainer_bridge import UpdateResult
from trainer_bridge.transport.ray_actor import RayEngine

logger = logging.getLogger(__name__)

Pairs = AsyncIterator[tuple[str, torch.Tensor]]


class Adapter(ServerAdapter):  # type: ignore[misc]
    """verl's, with another ``update_weights`` under ``rollout.quantization=fp8rl``.

    One is in each trainer rank (or checkpoint-engine worker); the first of a server's ranks leads.
    """

    _fp8rl_version = -1
    _fp8rl_engine: RayEngine | None = None

    async def update_weights(
        self,
        weights: Any,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **more: Any,
    ) -> None:
        """Send a policy; all ranks call it, since reading the weights is a collective.

        Args:
            weights: a generator or an async generator of (HF name, whole tensor). It is read to its
                end on every rank, whatever fails.
            global_steps: verl's step; it may repeat, go back or be missing. The policy version is
                the step where that is newer than the last version, else the next number.

        Raises:
            ValueError: differences of weights, or a LoRA adapter.
            EngineError, ManifestError: as ``trainer_bridge.update``; on the leader.
        """
        if not is_ours(self.config):
            await super().update_weights(weights, global_steps, wire_format, **more)
            return
        if wire_format != "named_tensors":
            raise ValueError(
                f"wire format {wire_format} sends differences of weights, and an fp8rl engine "
                f"needs whole tensors; use checkpoint_engine.backend naive, nccl, nixl or mooncake"
            )
        if more.get("peft_config") is not None:
            raise ValueError(
                "an fp8rl engine serves no LoRA adapters; set actor_rollout_ref.model.lora.merge="
                "True, which sends merged weights"
            )
        pairs = _asynchronous(weights)
        try:
            await self._init_server_adapter()
            if self._is_server_tp_leader():
                await self._lead(pairs, global_steps)
        finally:
            async for _ in pairs:  # each tensor is gathered by all ranks together
                pass

    async def _lead(self, pairs: Pairs, step: int | None) -> None:
        version = self._fp8rl_version + 1
        version = self._fp8rl_version = version if step is None else max(step, version)
        if self._fp8rl_engine is None:
            self._fp8rl_engine = RayEngine(self.server_actor)
        await self.server_actor.fp8rl_note_step.remote(version, step)
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        stream = _from_thread(pairs, asyncio.get_running_loop())
        send = partial(
            trainer_bridge.update,
            stream,
            self._fp8rl_engine,
            version=version,
            announce=self.model_config.local_path,
        )
        result = await asyncio.to_thread(_on, device, send)
        logger.info("policy %d (step %s): %s", version, step, result)
        if step is not None:
            await self.server_actor.set_global_steps.remote(step)


def _on(gpu: int | None, send: Callable[[], UpdateResult]) -> UpdateResult:
    if gpu is not None:
        torch.cuda.set_device(gpu)  # a thread begins on the first one
    return send()


async def _asynchronous(weights: Any) -> Pairs:
    if hasattr(weights, "__aiter__"):
        async for pair in weights:
            yield pair
    else:
        for pair in weights:
            yield pair


def _from_thread(
    pairs: Pairs, loop: asyncio.AbstractEventLoop
) -> Iterator[tuple[str, torch.Tensor]]:
    """The pairs for another thread: each is made in the loop's own, where collectives belong."""

    async def following() -> tuple[str, torch.Tensor] | None:
        return await anext(pairs, None)

    while (pair := asyncio.run_coroutine_threadsafe(following(), loop).result()) is not None:
        yield pair
