"""Megatron's shards reach an engine through the exports of mbridge, byte for byte."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

import trainer_bridge
from tests.engine import expected
from tests.engine.conftest import Policies
from tests.engine.harness import FORKED, Server
from tests.engine.test_updates import sha256
from tests.trainer_bridge import ranks
from trainer_bridge.engines.engine_client import connect

try:
    import mbridge  # noqa: F401
except (ImportError, OSError) as error:  # megatron-core loads a CUDA library that 0.5.23 brings
    pytest.skip(f"mbridge cannot be imported: {error}", allow_module_level=True)
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

WORLD = 4
COLLECTIVE_TIMEOUT_S, JOIN_S = 300.0, 480.0
Layouts = list[tuple[int, int, int]]
"""Ranks of tensor, pipeline and expert parallelism; with fewer than four, ranks repeat others."""
LAYOUTS: dict[str, Layouts] = {
    "qwen3": [(2, 1, 1), (1, 2, 1), (2, 2, 1)],
    "qwen3_moe": [(2, 1, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2)],
}


def train(rank: int, folder: Path, *, address: str, policies: list[Path], layouts: Layouts) -> None:
    """An update from each layout: every rank walks the export, and the first one leads."""
    from tests.engine.megatron import Layout, stream

    for version, (policy, layout) in enumerate(zip(policies, layouts, strict=True)):
        exported = stream(policy, Layout(*layout))
        engine = address if rank == 0 else None
        result = trainer_bridge.update(exported, engine, version=version, group=dist.group.WORLD)
        assert result.version == version
        if rank == 0:
            digest = connect(address).control({"op": "digest"})["ranks"]
            (folder / f"{version}.json").write_text(json.dumps(digest))
        ranks.meet(rank, folder, f"update {version}", WORLD)


@pytest.mark.guarantee("all-or-none", fault="Megatron's shards of tensors, layers and experts")
@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=pytest.mark.full), "qwen3_moe"])
def test_shards_of_every_layout_leave_the_checkpoints_bytes(
    family: str, policies: Policies, tmp_path: Path
) -> None:
    """Each layout holds another policy, so that no update can pass for the one before."""
    start, *later = policies(family)
    layouts = LAYOUTS[family]
    later = later[: len(layouts)]
    log = tmp_path / "server.log"
    with Server(log, FORKED, start, environment={"FP8RL_BUCKET_BYTES": f"{1 << 19}"}) as server:
        worker = partial(train, address=server.address, policies=later, layouts=layouts)
        ranks.run(worker, tmp_path, WORLD, COLLECTIVE_TIMEOUT_S, JOIN_S)
    for version, (policy, layout) in enumerate(zip(later, layouts, strict=True)):
        held = sha256(json.loads((tmp_path / f"{version}.json").read_text()))
        assert held == expected.digests(policy, 1), layout
