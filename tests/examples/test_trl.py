"""The example of TRL, whose engine runs in the trainer's process."""

import ast
from pathlib import Path

import pytest

from examples.trl import tiny_model
from tests.examples.test_demo import run

STEPS = 3


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_stock_script_with_an_engine_attached(tmp_path: Path) -> None:
    checkpoint = tiny_model.save(tmp_path / "policy")
    options = f"--steps {STEPS} --learning-rate 1e-2 --output {tmp_path / 'output'}".split()
    out = run("examples/trl/grpo.py", str(checkpoint), *options)
    rows = [ast.literal_eval(line) for line in out.splitlines() if line.startswith("{'loss'")]
    assert [float(row["fp8rl/policy_version"]) for row in rows] == list(range(STEPS))
    assert all(0.9 < float(row["fp8rl/ess"]) <= 1.0 for row in rows)
    assert all(0 < float(row["reward"]) < 1 for row in rows)
