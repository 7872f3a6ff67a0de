"""A step's row of the experiment."""

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.parity import rollouts, run
from benchmarks.parity.learner import Learned
from benchmarks.parity.settings import SETTINGS
from benchmarks.parity.variants import ARMS
from trainer_bridge import Alarm, Rollout, correct

SMALL = replace(SETTINGS["tiny"], prompts=2, group=2)
ROWS = [[5, 6, 7], [5], [6, 6], [7, 7, 7, 7]]
BATCH = Rollout(
    [[1]] * 4, ROWS, [[-1.0] * len(row) for row in ROWS], [[0] * len(row) for row in ROWS],
    ["stop"] * 4, 1.0,
)  # fmt: skip


@pytest.mark.parametrize("is_wrong", [True, False])
def test_a_step_with_an_alarm_tells_its_worst_tokens(
    is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer_BT = BATCH.logprobs_BT.clone()
    trainer_BT[3, 2] -= 15.0
    correction = correct(BATCH, trainer_BT)
    alarm = Alarm("token_mult_prob_error", 99.0, 1.5, "a sentence")
    learned = Learned(replace(correction, alarms=(alarm,) * is_wrong), trainer_BT, 0.5)
    monkeypatch.setattr(rollouts, "respond", lambda *args: BATCH)
    monkeypatch.setattr(run, "learn", lambda *args: learned)
    nothing: Any = None
    row = run.take_step(nothing, nothing, ARMS["bf16"], 0, 7, SMALL)
    assert row["gradient_norm"] == 0.5
    assert row["logprob_abs_diff_max"] == 15.0
    assert [found["metric"] for found in row["alarms"]] == [alarm.metric] * is_wrong
    if not is_wrong:
        assert row["worst"] == []
        return
    assert len(row["worst"]) == 8
    worst = {"sequence": 3, "position": 2, "length": 4, "alive": 2}
    assert row["worst"][0] == worst | {"trainer_logprob": -16.0, "rollout_logprob": -1.0}
