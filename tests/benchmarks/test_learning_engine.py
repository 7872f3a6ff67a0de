"""Arms of the study on real engines, one of them killed on its way, then evaluated."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.learning.results import summarize, table
from benchmarks.learning.run import HELD_OUT, rows_of
from benchmarks.learning.study import CONTROL, LOG

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(2400)]

LIMIT_S = 1000
"""Of one process; longer is a hang. A start and three engines took 400 s beside other work."""
STEPS, CHECKPOINT_EVERY = 4, 2
KILL_AFTER = 3  # steps in the log: one more than the checkpoint has
SETTINGS = {
    "steps": STEPS,
    "demonstrations": 10,
    "demonstration_batch": 4,
    "prompts": 2,
    "group": 2,
    "evaluation_problems": 2,
    "evaluate_every": STEPS,
    "checkpoint_every": CHECKPOINT_EVERY,
    "held_out_problems": 4,
}


def start(state: Path, *words: str) -> "subprocess.Popen[bytes]":
    """A run, in a process group of its own."""
    common = ["--state", str(state), "--size", "tiny", "--settings", json.dumps(SETTINGS)]
    command = [sys.executable, "-m", "benchmarks.learning.run", *common, *words]
    with (state / "out").open("ab") as out:
        return subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)


def finish(process: "subprocess.Popen[bytes]", state: Path) -> None:
    """Wait for its end; at the limit its whole group is ended."""
    try:
        status = process.wait(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    assert status == 0, (state / "out").read_text()[-4000:]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows_of(folder / LOG) if row["kind"] == "step"]


def test_two_arms_with_a_kill_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8RL_COMMIT", "abc1234")  # the tree may change between the processes
    finish(start(tmp_path, "--arm", "bf16"), tmp_path)

    killed = tmp_path / "kv8-tis-0"
    process = start(tmp_path, "--arm", "kv8-tis")
    deadline = time.monotonic() + LIMIT_S
    while len(steps_of(killed)) < KILL_AFTER and time.monotonic() < deadline:
        assert process.poll() is None, (tmp_path / "out").read_text()[-4000:]
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = steps_of(killed)
    assert len(before) == KILL_AFTER
    finish(start(tmp_path, "--arm", "kv8-tis"), tmp_path)

    for name in ("bf16-0", "kv8-tis-0"):
        rows = rows_of(tmp_path / name / LOG)
        steps = [row for row in rows if row["kind"] == "step"]
        assert [row["step"] for row in steps] == list(range(STEPS))
        assert [row["step"] for row in rows if row["kind"] == "evaluation"] == [0, STEPS]
        assert all(0 < row["mismatch_kl_k3"] < 1 for row in steps)
    # What the checkpoint had is what it was; what came after it was sampled anew.
    after = steps_of(killed)
    assert after[:CHECKPOINT_EVERY] == before[:CHECKPOINT_EVERY]
    again = CHECKPOINT_EVERY
    assert after[again]["rollout_log_ppl"] != before[again]["rollout_log_ppl"]
    engines = {
        name: [row for row in rows_of(tmp_path / name / LOG) if row["kind"] == "engine"]
        for name in ("bf16-0", "kv8-tis-0")
    }
    assert [row["step"] for row in engines["kv8-tis-0"]] == [0, CHECKPOINT_EVERY]
    assert {row["fp8_matrices"] for row in engines["kv8-tis-0"]} == {8}
    assert [row["fp8_matrices"] for row in engines["bf16-0"]] == [0]
    kl = {name: sum(row["mismatch_kl_k3"] for row in steps_of(tmp_path / name)) for name in engines}
    assert kl["kv8-tis-0"] > kl["bf16-0"]

    for arm in ("kv8-fp8-forward", CONTROL):
        finish(start(tmp_path, "--arm", arm), tmp_path)
    of_control = sum(row["mismatch_kl_k3"] for row in steps_of(tmp_path / f"{CONTROL}-0"))
    assert of_control > 10 * kl["kv8-tis-0"]
    finish(start(tmp_path, "--held-out", "--seed", "0"), tmp_path)
    for name in ("start", f"{CONTROL}-0", "kv8-fp8-forward-0", *engines):
        assert json.loads((tmp_path / name / HELD_OUT).read_text())["problems"] == 4
    assert table(summarize(tmp_path)).count("\n| ") == 5
