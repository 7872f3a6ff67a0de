"""The commands that a user types: each process of a server imports SGLang and finds the plugin.

The servers of other tests are forked from a process that has done so.
"""

from pathlib import Path

import pytest

from tests.engine import models
from tests.engine.conftest import Policies
from tests.engine.harness import LAUNCH_SERVER, SGLANG_SERVE, START_TIMEOUT_S, Server
from tests.engine.serving import assert_quarantined, assert_serves
from trainer_bridge import update

COMMANDS = {"launch_server": LAUNCH_SERVER, "serve": SGLANG_SERVE}

pytestmark = pytest.mark.engine


@pytest.mark.timeout(START_TIMEOUT_S + 120)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_starts_what_is_updated(command: str, policies: Policies, tmp_path: Path) -> None:
    start, policy = policies("qwen3")[:2]
    options = "--load-format", "dummy", "--fp8rl-bucket-bytes", "1MiB"
    with Server(tmp_path / "log", COMMANDS[command], start, *options) as server:
        assert server.control({"op": "layout"})["bucket_bytes"] == 1 << 20
        assert_quarantined(server, "started with dummy weights")
        update(models.named_tensors(policy), server, version=0)
        assert_serves(server, policy, 0)
