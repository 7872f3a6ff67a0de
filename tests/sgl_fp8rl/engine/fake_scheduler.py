"""SGLang's scheduler as far as control messages and updates use it."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn

POOL = 16384
"""Tokens of the KV cache."""


class FakeScheduler:
    """It runs requests that never end; ``idle`` and ``flushes`` are what it says of itself."""

    def __init__(
        self, running: Sequence[Any] = (), waiting: Sequence[Any] = (), page_size: int = 1
    ) -> None:
        self.running, self.waiting_queue = list(running), list(waiting)
        self.page_size = page_size
        self.max_queued_requests: int | None = 1
        self.idle = self.flushes = True
        self.asked = self.retracted = 0
        self.enable_hierarchical_cache = self._engine_paused = False
        self._pending_chunked_abort_req: Any = None
        self.grammar_manager = SimpleNamespace(grammar_queue=[])
        self.token_to_kv_pool_allocator = SimpleNamespace(available_size=lambda: POOL)
        self.sent: list[Any] = []
        self.versions: list[str] = []
        self.record_weight_version_change = self.versions.append
        tokenizer = SimpleNamespace(send_output=lambda output, request: self.sent.append(output))
        self.ipc_channels = SimpleNamespace(recv_from_rpc=None, send_to_tokenizer=tokenizer)

    def serve(self, model: nn.Module, group: Any = None, rpc: Any = None) -> None:
        """Run a model on one rank of a group, whose first one answers by ``rpc``."""
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        self.model_config = SimpleNamespace(vocab_size=8)
        self.tp_group = SimpleNamespace(cpu_group=group)
        self.ipc_channels.recv_from_rpc = rpc

    def is_fully_idle(self) -> bool:
        self.asked += 1
        return self.idle and not self.running and not self.waiting_queue

    def pause_generation(self, message: Any) -> None:
        assert message.mode == "retract"
        self._engine_paused, self.retracted = True, self.retracted + 1
        for one in self.running:
            limit = self.max_queued_requests
            assert limit is None or len(self.waiting_queue) < limit  # else SGLang would refuse it
            self.waiting_queue.append(one)
        self.running = []

    def continue_generation(self, message: Any) -> None:
        assert not message.torch_empty_cache
        self._engine_paused = False

    def flush_cache(self, empty_cache: bool) -> bool:
        assert not empty_cache
        assert not self.waiting_queue  # else SGLang refuses
        assert not self.grammar_manager.grammar_queue
        return self.flushes

    def abort_request(self, message: Any) -> None:
        assert message.abort_all  # SGLang takes the id of one for a prefix of others
        self.waiting_queue = []

    def rids(self) -> list[str]:
        return [one.rid for one in self.waiting_queue]
