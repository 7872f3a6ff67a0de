"""Every call that the soak makes of ``trainer_bridge``: what a change of its API touches."""

from dataclasses import dataclass
from typing import Any

import trainer_bridge
from tests.gpu.policies import Tensors
from tests.logprob_oracle import Sampled
from trainer_bridge import EngineError

Named = Tensors | list[tuple[str, Any]]
SERVING, QUARANTINED = "serving", "quarantined"
RUN = "soak"
"""Of all of its trainers, whose processes differ."""


@dataclass(frozen=True)
class Status:
    """What the engine says of its weights."""

    state: str
    version: int
    reason: str


def update(named: Named, engine: Any, version: int, in_flight: str) -> None:
    """One update. Raises EngineError, ManifestError."""
    trainer_bridge.update(named, engine, version=version, run=RUN, in_flight=in_flight)


def another_client(address: str) -> Any:
    """A client that shares nothing with those before."""
    return trainer_bridge.connect(address)


def sample(engine: Any, prompts: list[list[int]], tokens: int) -> list[Sampled]:
    """Responses of at most ``tokens`` tokens. Raises EngineError, in quarantine with status 503."""
    found = trainer_bridge.rollout(
        engine, prompts, {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
    )
    rows = zip(found.prompt_tokens, found.tokens, found.logprobs, found.versions, strict=True)
    return [Sampled(*row) for row in rows]


def status(engine: Any) -> Status:
    """Ask the engine. Raises EngineError."""
    layout = engine.control({"op": "layout"})
    return Status(layout["state"], int(layout["version"]), str(layout["reason"]))


def is_refusal(error: Exception) -> bool:
    """Whether the engine refused to generate in quarantine."""
    return isinstance(error, EngineError) and error.status == 503


def is_abort(error: Exception) -> bool:
    """Whether SGLang aborted the request as a whole, as a user's pause with mode "abort" does."""
    return isinstance(error, EngineError) and error.status == 499
