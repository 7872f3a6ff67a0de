"""An engine that lives in a Ray actor, as verl's, slime's and miles' servers do."""

from collections.abc import Sequence
from typing import Any

from trainer_bridge.engines.engine_client import CONTROL_TIMEOUT_S, EngineError

__all__ = ["RayEngine"]


class RayEngine:
    """A client of an engine in a Ray actor; ``trainer_bridge.update`` takes it as its engine.

    Keep one for each engine: what the trainer keeps between updates belongs to it.

    Args:
        actor: a handle of the actor, whose method ``fp8rl_control`` takes a control message and
            returns its reply, or raises ``EngineError``.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def control(
        self, message: dict[str, Any], timeout_s: float = CONTROL_TIMEOUT_S
    ) -> dict[str, Any]:
        """Send one control message and wait for its reply.

        Args:
            message: the message.
            timeout_s: seconds to wait for it.

        Returns:
            the engine's reply.

        Raises:
            EngineError: the engine refused it, or its actor cannot be reached.
        """
        import ray

        try:
            sent = self._actor.fp8rl_control.remote(message)
            return ray.get(sent, timeout=timeout_s)  # type: ignore[no-any-return]
        except ray.exceptions.RayError as error:
            # what the method raised, unless Ray itself failed
            cause = getattr(error, "cause", error)
            if isinstance(cause, EngineError):
                raise cause from None
            raise EngineError(
                f"the engine's Ray actor gave no reply ({type(cause).__name__}: {cause}); see its "
                f"log"
            ) from error

    def sample(
        self, requests: Sequence[dict[str, Any]], timeout: float | None = None
    ) -> list[dict[str, Any] | EngineError]:
        """Refused: the framework that owns the actor samples by its own methods.

        Args:
            requests: not looked at.
            timeout: not looked at.

        Returns:
            never.

        Raises:
            EngineError: always.
        """
        raise EngineError("this engine is a Ray actor; sample with the framework that started it")
