"""A chain from a trainer to a real server, brought there by the command, a process of its own."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engine import models
from tests.engine.conftest import Policies
from tests.engine.harness import FORKED, Server
from tests.engine.serving import assert_serves
from tests.engine.test_kv_cache import KV_HEADS, LAYERS
from trainer_bridge.chain import ChainPublisher

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SCALES = (torch.arange(1.0, 1 + LAYERS * 2) / 8).view(LAYERS, 2, 1).expand(LAYERS, 2, KV_HEADS)
FOLLOW_S = 120.0


@pytest.fixture(
    scope="module", params=["block-fp8", pytest.param("block-fp8-ue8m0", marks=pytest.mark.full)]
)
def server(
    request: pytest.FixtureRequest, policies: Policies, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with Server(
        tmp_path_factory.mktemp("chain") / "server.log",
        FORKED,
        policies("qwen3")[0],
        *("--kv-cache-dtype", "fp8_e4m3", "--fp8rl-format", request.param),
    ) as started:
        yield started


@pytest.mark.guarantee("all-or-none", fault="a server that follows a chain")
def test_a_server_follows(server: Server, policies: Policies, tmp_path: Path) -> None:
    """Each version has its weights and its KV scales."""
    publisher = ChainPublisher(tmp_path, server.address)
    command = [sys.executable, "-m", "sgl_fp8rl.tools.cli", "follow", str(tmp_path), server.address]
    for version, checkpoint in enumerate(policies("qwen3")[1:3]):
        named = models.named_tensors(checkpoint)
        publisher.publish(named, version=version, run="r", kv_scales=SCALES * (1 + version))
        subprocess.run([*command, "--once"], check=True, timeout=FOLLOW_S)
        assert_serves(server, checkpoint, version)
        assert server.control({"op": "kv"})["scales"] == (SCALES * (1 + version)).tolist()
