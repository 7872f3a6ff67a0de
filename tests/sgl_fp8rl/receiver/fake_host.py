"""Ranks of an engine without SGLang: threads, each with a host of its own."""

import threading
from collections.abc import Callable
from typing import Any

from torch import nn

from sgl_fp8rl.protocol.policy import Policy

TIMEOUT_S = 45.0
"""More than a rank waits for its trainer (30 s), and less than a test for a session's end."""


class Exchange:
    """What the ranks of one engine say to each other."""

    def __init__(self, ranks: int, timeout_s: float = TIMEOUT_S) -> None:
        self._barrier = threading.Barrier(ranks, timeout=timeout_s)
        self._values: list[Any] = [None] * ranks

    def abort(self) -> None:
        """Let the other ranks fail: one is gone."""
        self._barrier.abort()

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()  # before any of them says the next
        return values


class FakeHost:
    """An idle engine, which generates nothing: ``EngineHost`` of the real update steps."""

    def __init__(
        self, rank: int, exchange: Exchange, tell: Callable[[dict[str, Any]], None]
    ) -> None:
        self.rank, self._exchange, self._tell = rank, exchange, tell
        self.policies: list[Policy] = []
        self.refused: list[str] = []

    def gather(self, value: Any) -> list[Any]:
        return self._exchange.gather(self.rank, value)

    def tell(self, reply: dict[str, Any]) -> None:
        if self.rank == 0:
            self._tell(reply)

    def make_idle(self) -> bool:
        return True

    def holds_requests(self, in_flight: object) -> bool:
        return False

    def why_not_retract(self) -> str | None:
        return None

    def retract(self) -> bool:
        return True

    def why_not_written(self, model: nn.Module) -> str | None:
        return None

    def refuse_waiting(self, message: str) -> None:
        self.refused.append(message)

    def committed(self, policy: Policy) -> None:
        self.policies.append(policy)
