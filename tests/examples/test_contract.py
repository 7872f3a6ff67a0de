"""The example of the contract: it passes on a real engine, and finds a fault of its adapter."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.contract import __main__ as example
from examples.trl import tiny_model
from tests.engine import expected
from tests.engine.harness import FORKED, Server
from tests.engine.test_updates import sha256
from tests.examples.test_demo import run
from trainer_bridge.adapters.contract import ContractError

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.save(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It starts with another policy."""
    folder = tmp_path_factory.mktemp("server")
    with Server(folder / "log", FORKED, tiny_model.save(folder / "start", seed=1)) as running:
        yield running


def test_an_adapter_keeps_the_contract(policy: Path, server: Server) -> None:
    assert "keeps the contract" in run("-m", "examples.contract", str(policy), server.address)
    held = sha256(server.control({"op": "digest"})["ranks"])
    assert held == expected.digests(policy, 1)


def test_a_fault_of_the_adapter_is_found(
    policy: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "next_version", lambda step, last: step or 0)
    with pytest.raises(ContractError, match=r"max\(step, last \+ 1\)"):
        example.main(policy, server.address)
