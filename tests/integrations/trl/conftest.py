"""A trainer of TRL, and an engine without SGLang."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.trl import tiny_model
from examples.trl.tiny_model import END
from sgl_fp8rl.protocol.policy import Policy
from tests.integrations.trl import tiny
from tests.trainer_bridge import test_rollout
from trainer_bridge import UpdateResult
from trainer_bridge.adapters import trl as adapter
from trainer_bridge.session.kept import KEPT

Make = Callable[..., Any]
"""Makes a trainer without an engine, of options of ``GRPOConfig``."""


class FakeEngine(test_rollout.FakeEngine):
    """A completion is the prompt's first token, its number in the batch, the end.

    ``edit`` may spoil a reply on its way out; it is given the number too.
    """

    def __init__(self) -> None:
        super().__init__(version=-1, run="")
        self.edit: Callable[[int, Any], Any] = lambda index, reply: reply  # type: ignore[assignment]

    @property
    def prompts(self) -> list[list[int]]:
        return [request["input_ids"] for request in self.requests]

    @property
    def sampling(self) -> dict[str, Any]:
        return self.requests[0]["sampling_params"]  # type: ignore[no-any-return]

    def sample(self, requests: Sequence[dict[str, Any]], timeout: float | None = None) -> list[Any]:
        self.requests.clear()
        return super().sample(requests, timeout)

    def reply(self, i: int, request: dict[str, Any]) -> Any:
        ids = [request["input_ids"][0], i, END]
        meta = {
            "finish_reason": {"type": "stop", "matched": END},
            "output_token_logprobs": [[-6.0 - t, token, None] for t, token in enumerate(ids)],
            "policy_version": [self.version] * len(ids),
            "policy_run": [self.run, "", ""],
        }
        return self.edit(i, {"output_ids": ids, "meta_info": meta})


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
