"""verl's adapter of the rollout ``sglang``: its weights reach an fp8rl server by ``update``."""

import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

import trainer_bridge
from sgl_fp8rl.verl.rollout_config import is_ours
from trainer_bridge.adapters.updates import Pair, asynchronous, in_thread, next_version
from trainer_bridge.sources import hf_names
from trainer_bridge.transport.ray_actor import RayEngine

logger = logging.getLogger(__name__)


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
                end on every rank, whatever fails: so verl also takes merged adapters out again.
            global_steps: verl's step; see ``next_version``.

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
        pairs = asynchronous(weights)
        try:
            await self._init_server_adapter()
            if self._is_server_tp_leader():
                await self._lead(pairs, global_steps)
        finally:
            async for _ in pairs:  # each tensor is gathered by all ranks together
                pass

    async def _lead(self, pairs: AsyncIterator[Pair], step: int | None) -> None:
        version = self._fp8rl_version = next_version(step, self._fp8rl_version)
        if self._fp8rl_engine is None:
            self._fp8rl_engine = RayEngine(self.server_actor)
        await self.server_actor.fp8rl_note_step.remote(version, step)
        send = partial(
            trainer_bridge.update,
            engine=self._fp8rl_engine,
            version=version,
            announce=self.model_config.local_path,
        )
        named = _by_checkpoint_names(pairs, self.model_config.hf_config.model_type)
        result = await in_thread(send, named)
        logger.info("policy %d (step %s): %s", version, step, result)
        if step is not None:
            await self.server_actor.set_global_steps.remote(step)


async def _by_checkpoint_names(pairs: AsyncIterator[Pair], family: str) -> AsyncIterator[Pair]:
    """Each tensor that a checkpoint names. With merged adapters, verl hands over the experts of a
    layer as the model has them: as one."""
    async for name, whole in pairs:
        for hf_name, cut in hf_names.split(name, tuple(whole.shape), family):
            yield hf_name, cut(whole)
