"""What our trainer of verl adds to a step's metrics, of a batch in verl's own form."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

import torch
from tensordict import TensorDict
from verl.trainer.ppo.v1 import PPOTrainerSync

from sgl_fp8rl.verl import trainer
from trainer_bridge.metrics import alarms

LENGTHS = [alarms.MIN_TOKENS, 8]


@pytest.mark.parametrize("shift", [0.0, 2.0])
def test_alarms_are_logged_and_warned_of(
    shift: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rollout logprobs that are off by so many nats, in a batch of enough tokens."""
    logprobs = nested([torch.full((length,), -3.0) for length in LENGTHS])
    kept = {
        "old_log_probs": logprobs,
        "rollout_log_probs": logprobs + shift,
        "response_mask": nested([torch.ones(length, dtype=torch.int64) for length in LENGTHS]),
    }

    def get(keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        assert (keys, partition_id) == (["a", "b"], "train")
        return TensorDict({name: kept[name] for name in select_fields}, batch_size=len(LENGTHS))

    batch = SimpleNamespace(keys=["a", "b"], partition_id="train")
    monkeypatch.setattr(PPOTrainerSync, "step", lambda self, metrics, timing: batch)
    monkeypatch.setattr(trainer.transfer_queue, "kv_batch_get", get)
    monkeypatch.setattr(alarms, "_announced", set())
    metrics: dict[str, Any] = {"actor/loss": 1.0}
    made: Any = object.__new__(trainer.Trainer)
    assert made.step(metrics, {}) is batch
    assert metrics["actor/loss"] == 1.0
    assert metrics["fp8rl/logprob_abs_diff_max"] == pytest.approx(shift)
    assert (metrics["fp8rl/alarms"] > 0) is (shift > 0)
    warned = any("rollout and trainer are not the same policy" in m for m in caplog.messages)
    assert warned is (shift > 0)


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
