"""Two trainer ranks send to a server of two ranks that they take for one on another host, chunks in
turn."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import trainer_bridge
from sgl_fp8rl.protocol import place
from sgl_fp8rl.protocol.manifest import SLOTS
from tests.engine import models
from tests.engine.conftest import Policies
from tests.engine.harness import FORKED, Server
from tests.engine.serving import assert_few_bytes, assert_serves
from tests.engine.test_kv_cache import KV_HEADS, LAYERS
from tests.trainer_bridge import ranks
from tests.trainer_bridge.test_fsdp import gathered
from tests.trainer_bridge.test_shared_sending import sent_by
from trainer_bridge.ways import remote

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

WORLD, TP, COLLECTIVE_TIMEOUT_S = 2, 2, 60.0
BUCKET_BYTES = 512 << 10
KEY = "a-shared-secret"
SCALES = (torch.arange(1.0, 1 + LAYERS * 2) / 8).view(LAYERS, 2, 1)


@pytest.fixture(
    scope="module", params=["qwen3_moe_cut", pytest.param("qwen2_cut", marks=pytest.mark.full)]
)
def family(request: pytest.FixtureRequest) -> str:
    """Whose experts, and whose layers, the engine's ranks cut inside of blocks and pad."""
    return str(request.param)


@pytest.fixture(scope="module")
def server(
    family: str, policies: Policies, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with Server(
        tmp_path_factory.mktemp("remote") / "server.log",
        FORKED,
        policies(family)[0],
        *("--tp-size", f"{TP}", "--kv-cache-dtype", "fp8_e4m3"),
        *("--fp8rl-bucket-bytes", str(BUCKET_BYTES)),
        *("--fp8rl-listen", "any", "--fp8rl-snapshot-bytes", "64MiB"),
        environment={"FP8RL_KEY": KEY, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
        key=KEY,
    ) as started:
        yield started


def sharded_trainer(rank: int, folder: Path) -> None:
    """One of two ranks, of which each holds half of the rows."""
    address, *checkpoints = (folder / "arguments").read_text().split()
    mesh = init_device_mesh("cpu", (WORLD,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FP8RL_KEY", KEY)
        patch.setattr(place, "BOOT", folder / "boot_id")
        patch.setattr(remote, "LEAST_CHUNK_BYTES", BUCKET_BYTES // (SLOTS * WORLD))
        sent = sent_by(patch)
        for version, checkpoint in enumerate(checkpoints, start=1):
            named = {
                name: distribute_tensor(tensor, mesh, [Shard(0)])
                for name, tensor in models.named_tensors(Path(checkpoint))
            }
            scales = None if rank else (SCALES * version).expand(LAYERS, 2, KV_HEADS)
            sent.clear()
            to = None if rank else address
            result = trainer_bridge.update(named, to, version=version, kv_scales=scales)
            of_ranks = gathered(set(sent))
            assert all(of_ranks) and not set.intersection(*of_ranks)
            if version < len(checkpoints):
                assert result.network_bytes >= result.bytes, result
            else:
                assert_few_bytes(result)


@pytest.mark.guarantee("all-or-none", fault="two ranks that send to a server on another host")
def test_ranks_send_in_turn(
    family: str, server: Server, policies: Policies, tmp_path: Path
) -> None:
    """Of the last update, which is a step of the one before, only changes travel."""
    (tmp_path / "boot_id").write_text("of another kernel")
    _, first, second, *_ = policies(family)
    checkpoints = [first, second, models.step(second, tmp_path / "stepped", seed=1)]
    words = server.address, *checkpoints
    (tmp_path / "arguments").write_text(" ".join(map(str, words)))
    ranks.run(sharded_trainer, tmp_path, WORLD, COLLECTIVE_TIMEOUT_S)
    wanted = (SCALES * len(checkpoints)).expand(LAYERS, 2, KV_HEADS)
    assert server.control({"op": "kv"})["scales"] == wanted.tolist()
    assert_serves(server, checkpoints[-1], len(checkpoints), TP)
