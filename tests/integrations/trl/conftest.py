"""A trainer of TRL, and an engine without SGLang."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.trl import tiny_model
from examples.trl.tiny_model import END
from sgl_fp8rl.protocol.policy import Policy
from tests.integrations.trl import tiny
from trainer_bridge import UpdateResult
from trainer_bridge.adapters import trl as adapter
from trainer_bridge.session.kept import KEPT

Make = Callable[..., Any]
"""Makes a trainer without an engine, of options of ``GRPOConfig``."""


class FakeEngine:
    """An EngineClient: a completion is the prompt's first token, its number in the batch, the end.

    ``edit`` may spoil a reply on its way out.
    """

    def __init__(self) -> None:
        self.run, self.version = "", -1
        self.prompts: list[list[int]] = []
        self.sampling: dict[str, Any] = {}
        self.edit: Callable[[int, dict[str, Any]], Any] = lambda index, reply: reply

    def control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
        assert message == {"op": "status"}
        serves = {"run": self.run, "version": self.version, "state": "serving"}
        return {**serves, "logprobs": {"raw": False}}

    def sample(self, requests: Sequence[dict[str, Any]], timeout: float | None = None) -> list[Any]:
        self.prompts = [request["input_ids"] for request in requests]
        self.sampling = requests[0]["sampling_params"]
        return [self.edit(i, self._reply(i, prompt)) for i, prompt in enumerate(self.prompts)]

    def _reply(self, index: int, prompt: list[int]) -> dict[str, Any]:
        ids = [prompt[0], index, END]
        meta = {
            "finish_reason": {"type": "stop", "matched": END},
            "output_token_logprobs": [[-6.0 - t, token, None] for t, token in enumerate(ids)],
            "policy_version": [self.version] * len(ids),
            "policy_run": [self.run, "", ""],
        }
        return {"output_ids": ids, "meta_info": meta}

    def close(self) -> None:
        pass


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """A fake engine, which an ``update`` of the adapter brings to its version."""
    fake = FakeEngine()

    def update(model: Any, engine: Any, *, version: int, run: str, group: Any) -> UpdateResult:
        assert engine is fake and group is None
        assert version > fake.version or run != fake.run
        fake.run, fake.version = run, version
        KEPT.connection_to(fake).policy = Policy(run, version)
        return UpdateResult(run, version, 1, 1, 0, {"total": 0.5}, None)

    monkeypatch.setattr(adapter, "update", update)
    return fake


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def make(checkpoint: Path, tmp_path: Path) -> Make:
    return lambda **options: tiny.make_trainer(checkpoint, tmp_path / "output", **options)


@pytest.fixture
def train(make: Make, engine: FakeEngine) -> Make:
    """Makes a trainer and trains it on the fake engine, a step if not told otherwise."""

    def run(**options: Any) -> Any:
        trainer = make(**{"max_steps": 1, **options})
        adapter.attach(trainer, engine)
        trainer.train()
        return trainer

    return run
