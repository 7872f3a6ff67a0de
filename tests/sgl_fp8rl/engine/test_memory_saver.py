"""Weights that SGLang released hold no version until the next update."""

from types import SimpleNamespace
from typing import Any

import pytest
import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)
import torch
from torch import nn

from sgl_fp8rl.engine.attached import attach
from sgl_fp8rl.engine.guards import note_resumed, quarantine_released
from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.weight_update.session import EngineWeights, State


def test_released_weights_are_quarantined_until_an_update() -> None:
    model = nn.Linear(2, 2)
    weights = EngineWeights(model, torch.bfloat16)
    weights.state = State.SERVING
    attach(model, weights)
    runner = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    updater = SimpleNamespace(tp_worker=runner, offload_tags=set())

    def release(updater: Any, tags: set[str]) -> str:
        updater.offload_tags |= tags
        return "released"

    def resume(updater: Any, tags: set[str]) -> str:
        updater.offload_tags -= tags
        return "resumed"

    assert quarantine_released(release, updater, {"kv_cache"}) == "released"
    assert weights.state is State.SERVING
    quarantine_released(release, updater, {"weights"})
    assert weights.state is State.QUARANTINED

    with pytest.raises(ManifestError, match="resume_memory_occupation"):
        weights.check_policy(Policy("any", 0))
    assert note_resumed(resume, updater, {"weights"}) == "resumed"
    assert weights.state is State.QUARANTINED
    assert not weights.released
    weights.check_policy(Policy("any", 0))
