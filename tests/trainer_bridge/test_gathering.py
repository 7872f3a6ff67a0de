"""Four ranks gather what they hold, and the first one fills the bucket."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from sgl_fp8rl.protocol.states import State
from tests.sgl_fp8rl.receiver import toy
from tests.trainer_bridge import ranks
from tests.trainer_bridge.shards_job import counted_gathers
from tests.trainer_bridge.test_update import SMALL, engine_of, failing, holds
from trainer_bridge.sources.parameters import Source
from trainer_bridge.transfer.packer import HostPacker
from trainer_bridge.updates.update import update

WORLD = 4
COLLECTIVE_TIMEOUT_S = 30


def meshes() -> dict[str, tuple[DeviceMesh, tuple[Any, ...]]]:
    flat = init_device_mesh("cpu", (WORLD,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    return {
        "fsdp": (flat, (Shard(0),)),
        "hsdp": (square, (Replicate(), Shard(0))),
        "rows twice": (square, (Shard(0), Shard(0))),
        "replicas": (flat, (Replicate(),)),
        "columns": (flat, (Shard(1),)),
    }


def distributed(
    tensors: toy.Tensors, mesh: DeviceMesh, placements: tuple[Any, ...]
) -> dict[str, torch.Tensor]:
    by_rows = (*(Shard(0) if isinstance(p, Shard) else p for p in placements),)
    return {
        name: distribute_tensor(tensor, mesh, placements if tensor.dim() > 1 else by_rows)
        for name, tensor in tensors.items()
    }


def outcome(named: dict[str, torch.Tensor], engine: Any, version: int) -> str:
    """The error of an update, the same on every rank."""
    found = ""
    try:
        update(named, engine, version=version)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is compared)
        found = f"{type(error).__name__}: {error}"
    everywhere: list[Any] = [None] * WORLD
    dist.all_gather_object(everywhere, found)
    assert everywhere == [found] * WORLD, everywhere
    return found


def gather(rank: int, folder: Path) -> None:
    logging.disable(logging.CRITICAL)
    engine = engine_of(2, SMALL) if rank == 0 else None
    gathers, version = counted_gathers(pytest.MonkeyPatch()), 0
    for name, (mesh, placements) in meshes().items():
        for dtype in (torch.bfloat16, torch.float32):
            tensors = toy.checkpoint(version)
            named = distributed({n: t.to(dtype) for n, t in tensors.items()}, mesh, placements)
            gathers.clear()
            assert not outcome(named, engine, version), name
            assert engine is None or holds(engine, tensors), (name, dtype)
            assert len(gathers) == len(tensors), name
            version += 1

    # the first rank fails in the middle: all hear of it, and the next update is whole again
    named = distributed(tensors, meshes()["fsdp"][0], (Shard(0),))
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(HostPacker, "put", failing(HostPacker.put))
        assert "no room" in outcome(named, engine, version)
    assert engine is None or engine.ranks[0].state is State.QUARANTINED
    assert not outcome(named, engine, version)
    assert engine is None or holds(engine, tensors)
    version += 1

    # another one does, and no longer takes part: their collective fails
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(Source, "read", failing(Source.read))
        with pytest.raises((MemoryError, RuntimeError)):
            update(named, engine, version=version)
    if engine is not None:
        assert engine.ranks[0].state is State.QUARANTINED
        update(tensors, engine, version=version)  # alone, with all of the weights
        assert holds(engine, tensors)


@pytest.mark.timeout(240)
@pytest.mark.guarantee("all-or-none", fault="a rank of the trainer fails among four")
def test_four_ranks_gather(tmp_path: Path) -> None:
    ranks.run(gather, tmp_path, WORLD, COLLECTIVE_TIMEOUT_S)
