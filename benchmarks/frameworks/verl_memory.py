"""Device memory around verl's weight updates, for ``actor_rollout_ref.model.external_lib``.

verl imports this file in its workers. Each update adds a line of JSON to the file that
``verl_log.MEMORY_VARIABLE`` names: what was free on this rank's GPU before the update, the least
that was free during it, and what was free after it, in bytes; all processes of the GPU count.
Before and after, the trainer's allocator holds nothing that it does not use. verl resumes the
engine's weights before, and its KV cache after.
"""

import functools
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from verl.workers.engine_workers import ActorRolloutRefWorker

from benchmarks.frameworks.verl_log import MEMORY_VARIABLE
from benchmarks.measuring import LeastFree, free_bytes

Update = Callable[..., Awaitable[None]]


def watched(update: Update) -> Update:
    """A rollout's ``update_weights`` that leaves a line for each update."""

    async def update_weights(weights: Any, **more: Any) -> None:
        torch.cuda.empty_cache()
        before = free_bytes()
        with LeastFree() as least:
            await update(weights, **more)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        line = {
            "step": more.get("global_steps"),
            "rank": int(os.environ["RANK"]),
            "before": before,
            "least": min(least.bytes, before),
            "after": free_bytes(),
        }
        with Path(os.environ[MEMORY_VARIABLE]).open("a") as log:
            log.write(json.dumps(line) + "\n")

    return update_weights


def _install() -> None:
    stock = ActorRolloutRefWorker.update_weights

    @functools.wraps(stock)  # also what verl has noted on it
    async def update_weights(self: Any, *args: Any, **keywords: Any) -> Any:
        if "update_weights" not in vars(self.rollout):
            self.rollout.update_weights = watched(self.rollout.update_weights)
        return await stock(self, *args, **keywords)

    ActorRolloutRefWorker.update_weights = update_weights


_install()
