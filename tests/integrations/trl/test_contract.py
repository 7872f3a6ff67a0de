"""TRL's adapter and the contract of adapters: a stock trainer, and an engine that is updated."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import models
from tests.integrations.trl import conftest
from tests.integrations.trl.conftest import Make
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge.test_fsdp import plain_engine
from trainer_bridge.adapters.contract import CHANGING, check_refusals, check_resume, check_updates
from trainer_bridge.adapters.trl import attach

pytestmark = pytest.mark.timeout(120)


class Engine(conftest.FakeEngine):
    """Has the checkpoint's tensors as they are, takes updates, and samples unless quarantined."""

    def __init__(self, tensors: toy.Tensors) -> None:
        super().__init__()
        self.engine = FakeEngine(plain_engine(tensors).ranks)

    def control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
        reply = self.engine.control(message)
        if message["op"] != "status":
            return reply
        self.run, self.version = reply["run"], reply["version"]
        return reply | {"logprobs": {"raw": False}}

    def sample(self, requests: Sequence[dict[str, Any]], timeout: float | None = None) -> list[Any]:
        self.engine.sampled()
        return super().sample(requests, timeout)


def test_updates_and_resumes(make: Make, checkpoint: Path) -> None:
    tensors = dict(models.named_tensors(checkpoint))
    engine, trainer = Engine(tensors), None

    def start() -> Any:
        nonlocal trainer
        trainer = make()
        attach(trainer, engine)
        return sync

    def sync(pairs: Any, step: int | None) -> int:
        assert trainer is not None
        trainer.model.load_state_dict(dict(pairs), strict=False)
        trainer.state.global_step = trainer.state.global_step if step is None else step
        trainer.vllm_generation.sync_weights()
        return trainer.vllm_generation.version  # type: ignore[no-any-return]

    def sample() -> list[int]:
        assert trainer is not None
        _, (tokens,), _, _ = trainer.vllm_generation.generate([[1, 2]], None, 1)
        return [trainer.vllm_generation.version] * len(tokens)  # it refuses those of others

    check_updates(engine, lambda: iter(tensors.items()), start(), sample)
    check_resume(engine, lambda: iter(tensors.items()), start, sample)
    held = engine.engine.ranks[0].model
    assert all(torch.equal(held.get_parameter(name), tensors[name]) for name in tensors)


def test_sampling_that_changes_logprobs_is_refused(make: Make) -> None:
    check_refusals(lambda options: attach(make(**options), "http://127.0.0.1:1"), CHANGING)
