"""Two arms of the study on real engines, one of them killed on its way, then evaluated."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.parity.run_log import HELD_OUT, LOG, rows_of

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


def start(
    script: str, state: Path, *words: str, settings: dict[str, Any] = SETTINGS
) -> "subprocess.Popen[bytes]":
    """A script of a study, in a process group of its own."""
    common = ["--state", str(state), "--size", "tiny", "--settings", json.dumps(settings)]
    command = [sys.executable, "-m", f"benchmarks.parity.{script}", *common, *words]
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
    finish(start("run", tmp_path, "--arm", "bf16"), tmp_path)

    killed = tmp_path / "fp8-kv8-0"
    process = start("run", tmp_path, "--arm", "fp8-kv8")
    deadline = time.monotonic() + LIMIT_S
    while len(steps_of(killed)) < KILL_AFTER and time.monotonic() < deadline:
        assert process.poll() is None, (tmp_path / "out").read_text()[-4000:]
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = steps_of(killed)
    assert len(before) == KILL_AFTER
    finish(start("run", tmp_path, "--arm", "fp8-kv8"), tmp_path)

    for name in ("bf16-0", "fp8-kv8-0"):
        rows = rows_of(tmp_path / name / LOG)
        steps = [row for row in rows if row["kind"] == "step"]
        assert [row["step"] for row in steps] == list(range(STEPS))
        assert [row["step"] for row in rows if row["kind"] == "evaluation"] == [0, STEPS]
        assert [row["kind"] for row in rows].count("run") == 1
        assert all(0 < row["mismatch_kl_k3"] < 1 for row in steps)
    # What the checkpoint had is what it was; what came after it was sampled anew.
    after = steps_of(killed)
    assert after[:CHECKPOINT_EVERY] == before[:CHECKPOINT_EVERY]
    again = CHECKPOINT_EVERY
    assert after[again]["rollout_log_ppl"] != before[again]["rollout_log_ppl"]
    engines = {
        name: [row for row in rows_of(tmp_path / name / LOG) if row["kind"] == "engine"]
        for name in ("bf16-0", "fp8-kv8-0")
    }
    assert [row["step"] for row in engines["fp8-kv8-0"]] == [0, CHECKPOINT_EVERY]
    assert {row["fp8_matrices"] for row in engines["fp8-kv8-0"]} == {8}
    assert [row["fp8_matrices"] for row in engines["bf16-0"]] == [0]
    kl = {name: sum(row["mismatch_kl_k3"] for row in steps_of(tmp_path / name)) for name in engines}
    assert kl["fp8-kv8-0"] > kl["bf16-0"]

    finish(start("held_out", tmp_path, "--model", "dense", "--seed", "0"), tmp_path)
    for name in ("start-dense", *engines):
        assert json.loads((tmp_path / name / HELD_OUT).read_text())["problems"] == 4
