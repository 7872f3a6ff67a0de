"""A server with dummy weights and a key: nothing is served until the first update."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import trainer_bridge
from sgl_fp8rl.formats.weight_format import TensorSpec
from sgl_fp8rl.protocol.manifest import Manifest
from tests.engine import models
from tests.engine.conftest import Policies
from tests.engine.harness import FORKED, Server
from tests.engine.serving import (
    assert_few_bytes,
    assert_quarantined,
    assert_serves,
    begin_message,
    by_hand,
    leave_the_host,
    update,
    version_of,
)
from trainer_bridge.engines.engine_client import EngineError

pytestmark = pytest.mark.engine

KEY = "a-shared-secret"


@pytest.fixture(scope="module")
def guarded(policies: Policies, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It starts with dummy weights, and has a key and little patience for a silent trainer."""
    with Server(
        tmp_path_factory.mktemp("guarded") / "server.log",
        FORKED,
        policies("qwen3")[0],
        *("--load-format", "dummy"),
        *("--fp8rl-bucket-bytes", "1MiB", "--fp8rl-session-timeout-s", "8"),
        *("--fp8rl-listen", "any", "--fp8rl-snapshot-bytes", "64MiB"),
        environment={"FP8RL_KEY": KEY},
        key=KEY,
    ) as server:
        yield server


def test_dummy_start(guarded: Server, policies: Policies, monkeypatch: pytest.MonkeyPatch) -> None:
    start, policy, *_ = policies("qwen3")
    assert guarded.control({"op": "layout"})["bucket_bytes"] == 1 << 20
    assert_quarantined(guarded, "started with dummy weights")

    strange = Manifest({"model.stranger.weight": TensorSpec(torch.bfloat16, (4, 4))})
    with pytest.raises(EngineError) as refusal:
        guarded.control(begin_message(strange, 0))
    assert refusal.value.status == 400
    assert_quarantined(guarded, "started with dummy weights")

    monkeypatch.setenv("FP8RL_KEY", KEY)
    for version, checkpoint in enumerate((start, policy)):
        trainer_bridge.update(models.named_tensors(checkpoint), guarded.address, version=version)
        assert_serves(guarded, checkpoint, version)


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}])
@pytest.mark.parametrize("message", ["layout", "begin", "digest", "end"])
def test_key(guarded: Server, header: dict[str, str], message: str) -> None:
    status, reply = guarded.ask("/fp8rl", json.dumps({"op": message}).encode(), header)
    assert status == 401
    assert "the key is missing or wrong" in reply["error"]


@pytest.mark.guarantee("all-or-none", fault="a trainer on another host, over TCP")
def test_trainer_on_another_host(
    guarded: Server, policies: Policies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows no socket and no memory of the engine's host: it takes itself for another one."""
    leave_the_host(monkeypatch, tmp_path)
    trainer_bridge.close(guarded)
    for policy in policies("qwen3")[1:3]:
        assert_serves(guarded, policy, update(guarded, policy))
    version = version_of(guarded) + 1
    tensors = models.named_tensors(policies("qwen3")[2])
    again = trainer_bridge.update(tensors, guarded, version=version)
    assert again.network_bytes < again.bytes // 1000  # nothing has changed
    assert_serves(guarded, policies("qwen3")[2], version)
    stepped = models.step(policies("qwen3")[2], tmp_path / "stepped", seed=1)
    version += 1
    result = trainer_bridge.update(models.named_tensors(stepped), guarded, version=version)
    assert_few_bytes(result)
    assert_serves(guarded, stepped, version)
    bad = {name: tensor.clone() for name, tensor in models.named_tensors(policies("qwen3")[0])}
    bad["model.layers.1.mlp.down_proj.weight"][-1, -1] = torch.nan
    with pytest.raises(EngineError, match="down_proj"):
        trainer_bridge.update(bad, guarded, version=version + 1)
    # the trainer, which quantizes, found it before the engine's ranks were given anything
    assert_serves(guarded, stepped, version)
    policy = policies("qwen3")[3]
    assert_serves(guarded, policy, update(guarded, policy))
    trainer_bridge.close(guarded)


@pytest.mark.guarantee("quarantine", fault="a trainer that falls silent")
def test_silent_trainer(guarded: Server, policies: Policies) -> None:
    policy = policies("qwen3")[2]
    version = update(guarded, policy)
    tensors = list(models.named_tensors(policies("qwen3")[3]))
    with by_hand(guarded, tensors, version + 1) as trainer:
        trainer.write(*range(12))
        ended = guarded.control({"op": "end"})
    assert "the trainer was silent for 8 s" in ended["failure"]
    assert_quarantined(guarded, "silent")
    assert_serves(guarded, policy, update(guarded, policy))
