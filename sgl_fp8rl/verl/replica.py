"""verl's replica of the rollout ``sglang``: it starts our server where the key asks for it."""

from typing import Any

import ray
from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica

from sgl_fp8rl.verl.rollout_config import is_ours


class Replica(SGLangReplica):  # type: ignore[misc]
    """verl's, with another server class under ``rollout.quantization=fp8rl``."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        if is_ours(self.config):
            # nothing else of ours is imported without the key
            from sgl_fp8rl.verl.server import Server

            self.server_class = ray.remote(Server)
