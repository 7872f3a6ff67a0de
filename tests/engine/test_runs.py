"""A trainer that is resumed is another run: its versions begin anywhere, and tokens say whose."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

import trainer_bridge
from tests.engine import models
from tests.engine.conftest import Policies
from tests.engine.harness import CALL_TIMEOUT_S, Server
from tests.engine.serving import ASK, assert_serves, update
from tests.engine.test_in_flight import caught, controlled
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.updates.update import RUN

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def server(policies: Policies, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with controlled(tmp_path_factory.mktemp("runs"), policies("qwen3")[0]) as started:
        yield started


def runs_of(reply: dict[str, Any]) -> list[str]:
    """The run of each token: one that says nothing has that of the token before."""
    runs: list[str] = []
    for run in reply["meta_info"]["policy_run"]:
        runs.append(run or (runs[-1] if runs else ""))
    return runs


def weight_version(server: Server) -> str:
    with urllib.request.urlopen(server.address + "/model_info", timeout=CALL_TIMEOUT_S) as reply:
        return str(json.load(reply)["weight_version"])


def test_tokens_of_the_checkpoint_have_no_run(server: Server) -> None:
    (reply,) = server.generate(ASK)
    assert set(runs_of(reply)) == {""}
    assert set(reply["meta_info"]["policy_version"]) == {-1}


@pytest.mark.guarantee(
    "runs", fault="a trainer resumed at an older version, while the one before it goes on"
)
def test_a_resumed_trainer_goes_back(server: Server, policies: Policies) -> None:
    _, policy, other, *_ = policies("qwen3")
    trainer_bridge.update(models.named_tensors(policy), server, version=150)
    (reply,) = server.generate(ASK)
    assert set(runs_of(reply)) == {RUN}
    assert reply["meta_info"]["weight_version"] == weight_version(server) == "150"

    trainer_bridge.update(models.named_tensors(other), server, version=100, run="resumed")
    assert_serves(server, other, 100)
    (reply,) = server.generate(ASK)
    assert set(runs_of(reply)) == {"resumed"}
    assert reply["meta_info"]["weight_version"] == weight_version(server) == "100"
    with pytest.raises(EngineError, match=f"run '{RUN}' was replaced"):
        update(server, policy)
    assert_serves(server, other, 100)


@pytest.mark.guarantee("runs", fault="a request that goes on under another run")
def test_a_request_that_goes_on_under_another_run(server: Server, policies: Policies) -> None:
    _, policy, other, *_ = policies("qwen3")
    trainer_bridge.update(models.named_tensors(policy), server, version=7, run="before")
    with caught(server) as (events, seen):
        assert len(seen[-1]["output_ids"]) > 0
        trainer_bridge.update(
            models.named_tensors(other), server, version=3, run="after", in_flight="retract"
        )
        reply = events.result(CALL_TIMEOUT_S)[-1]
    runs, versions = runs_of(reply), reply["meta_info"]["policy_version"]
    assert len(runs) == len(versions) == len(reply["output_ids"])
    assert set(zip(runs, versions, strict=True)) == {("before", 7), ("after", 3)}
    assert runs == sorted(runs, reverse=True)  # one change
    assert_serves(server, other, 3)
