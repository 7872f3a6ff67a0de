"""The example of the contract passes on a real engine."""

from pathlib import Path

import pytest

from examples.trl import tiny_model
from tests.engine import expected
from tests.engine.harness import FORKED, Server
from tests.engine.test_updates import sha256
from tests.examples.test_demo import run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_an_adapter_keeps_the_contract(tmp_path: Path) -> None:
    """The server starts with another policy."""
    policy = tiny_model.save(tmp_path / "policy")
    with Server(tmp_path / "log", FORKED, tiny_model.save(tmp_path / "start", seed=1)) as server:
        assert "keeps the contract" in run("-m", "examples.contract", str(policy), server.address)
        held = sha256(server.control({"op": "digest"})["ranks"])
    assert held == expected.digests(policy, 1)
