"""Megatron's weights reach a real server through the updater, byte for byte."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch.distributed as dist

from tests.engine import expected, models
from tests.engine.harness import CALL_TIMEOUT_S, FORKED, Server
from tests.engine.serving import assert_serves
from tests.engine.test_updates import sha256
from tests.integrations.slime import frameworks
from tests.trainer_bridge import ranks
from trainer_bridge.engines.engine_client import connect

try:
    import mbridge  # noqa: F401
except (ImportError, OSError) as error:  # megatron-core loads a CUDA library that 0.5.23 brings
    pytest.skip(f"mbridge cannot be imported: {error}", allow_module_level=True)
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

WORLD = 2
COLLECTIVE_TIMEOUT_S, JOIN_S = 300.0, 480.0
LAYOUTS = [(2, 1, 1), (1, 1, 2)]
"""Ranks of tensor, pipeline and expert parallelism, one layout for each policy."""
CHECKED = {"tp_size": 1, "pp_size": 1, "enable_memory_saver": False, "disaggregation_mode": "null"}
"""What slime asks ``/server_info`` of an external engine, and must find."""


def train(rank: int, folder: Path, *, address: str, later: list[Path]) -> None:
    from tests.engine.megatron import Layout, stream

    sys.modules.update(frameworks.modules("slime"))
    now: Any = {}
    args = frameworks.options("slime", [address.removeprefix("http://")])
    updater = frameworks.start(
        "slime", args, lambda: now, lambda each: stream(each["policy"], Layout(*each["layout"]))
    )
    for policy, layout in zip(later, LAYOUTS, strict=True):
        now.update(policy=policy, layout=layout)
        frameworks.update("slime", updater)
        if rank == 0:
            digest = connect(address).control({"op": "digest"})["ranks"]
            (folder / f"{updater.weight_version}.json").write_text(json.dumps(digest))
        assert updater.pop_metrics()["perf/fp8rl_update_bytes"] > 2 * frameworks.BUFFER_BYTES
        dist.barrier()
    assert updater.weight_version == len(later)


@pytest.mark.guarantee("all-or-none", fault="slime: an external engine and Megatron's shards")
def test_an_external_engine_has_the_bytes_of_each_policy(tmp_path: Path) -> None:
    start = models.make_checkpoint("qwen3_moe", tmp_path / "start")
    later = [models.perturb(start, tmp_path / f"policy {n}", n) for n in range(1, len(LAYOUTS) + 1)]
    with Server(tmp_path / "server.log", FORKED, start) as server:
        for route in ("server_info", "get_server_info"):
            with urlopen(f"{server.address}/{route}", timeout=CALL_TIMEOUT_S) as reply:
                told = json.load(reply)
            assert {name: told[name] for name in CHECKED} == CHECKED
        worker = partial(train, address=server.address, later=later)
        ranks.run(worker, tmp_path, WORLD, COLLECTIVE_TIMEOUT_S, JOIN_S)
        for version, policy in enumerate(later, 1):
            held = sha256(json.loads((tmp_path / f"{version}.json").read_text()))
            assert held == expected.digests(policy, 1), version
        assert_serves(server, later[-1], len(later))
        (reply,) = server.generate(
            {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}
        )
        assert reply["meta_info"]["weight_version"] == str(len(later))
