"""What the receiver of updates asks of the engine around it, on each of the engine's ranks."""

from typing import Any, Protocol

from torch import nn

from sgl_fp8rl.protocol.policy import Policy


class EngineHost(Protocol):
    """One rank of an engine. ``update_steps.py`` drives it, at the same step on every rank."""

    @property
    def rank(self) -> int:
        """Of this process, among those that ``gather`` reaches."""

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order; all ranks call it."""

    def tell(self, reply: dict[str, Any]) -> None:
        """Send the trainer's side a reply before the message is answered."""

    def make_idle(self) -> bool:
        """Empty the prefix cache; False while a request is there, and nothing changed."""

    def holds_requests(self, in_flight: object) -> bool:
        """Whether generation is paused, which keeps requests from ending as ``in_flight`` wants."""

    def why_not_retract(self) -> str | None:
        """Why requests in flight cannot be retracted, whatever they are; None where they can."""

    def retract(self) -> bool:
        """Take requests off the batch and empty the KV cache; False where it could not be."""

    def why_not_written(self, model: nn.Module) -> str | None:
        """Why weights that are written now would not reach all that is computed with."""

    def refuse_waiting(self, message: str) -> None:
        """Answer each request that waits with an error."""

    def committed(self, policy: Policy) -> None:
        """Name the policy in the engine's own replies, and forget what the one before had made."""
