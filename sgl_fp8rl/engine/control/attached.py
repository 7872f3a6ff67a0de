"""The update state of a model, which lies beside it: where every hook finds it."""

from typing import Any

import torch

from sgl_fp8rl.receiver.engine_weights import EngineWeights

_ATTRIBUTE = "_fp8rl_weights"


def attach(model: torch.nn.Module, weights: EngineWeights) -> None:
    """Keep a model's update state beside it."""
    object.__setattr__(model, _ATTRIBUTE, weights)


def weights_of(model: torch.nn.Module) -> EngineWeights | None:
    """The update state of a model, or None where fp8rl does not serve it."""
    return getattr(model, _ATTRIBUTE, None)


def scheduler_weights(scheduler: Any) -> EngineWeights | None:
    """The update state of the model that a scheduler runs, or None as above."""
    return weights_of(scheduler.tp_worker.model_runner.model)
