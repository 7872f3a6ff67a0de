"""Four ranks gather what they hold, and the first one fills the bucket."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sgl_fp8rl.protocol.states import State
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge import ranks
from trainer_bridge.sources.parameters import Source
from trainer_bridge.transfer.packer import HostPacker
from trainer_bridge.updates.update import update

WORLD = 4
COLLECTIVE_TIMEOUT_S = 30
SMALL = 2 * 128 * 256 * 2
"""A slot holds 128 rows of the widest matrix, so that there are several chunks."""


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


class Engine(FakeEngine):
    """Of two ranks."""

    def __init__(self) -> None:
        super().__init__([toy.engine(toy.toy(r, 2), toy.SHAPES) for r in range(2)], SMALL)

    def holds(self, tensors: toy.Tensors) -> bool:
        return all(
            toy.same(toy.contents(w.model), toy.expected(tensors, r, 2))
            for r, w in enumerate(self.ranks)
        )


def gather(rank: int, folder: Path) -> None:
    logging.disable(logging.CRITICAL)
    engine = Engine() if rank == 0 else None
    gathers: list[torch.Size] = []
    full_tensor = DTensor.full_tensor

    def counted(tensor: DTensor, **options: Any) -> torch.Tensor:
        gathers.append(tensor.shape)
        return full_tensor(tensor, **options)

    DTensor.full_tensor = counted  # type: ignore[method-assign]
    version = 0
    for name, (mesh, placements) in meshes().items():
        for dtype in (torch.bfloat16, torch.float32):
            tensors = toy.checkpoint(version)
            named = distributed({n: t.to(dtype) for n, t in tensors.items()}, mesh, placements)
            gathers.clear()
            assert not outcome(named, engine, version), name
            assert engine is None or engine.holds(tensors), (name, dtype)
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
    assert engine is None or engine.holds(tensors)
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
        assert engine.holds(tensors)


def failing(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same, but for the sixth time."""
    left = iter(range(5))

    def failing_late(*args: Any) -> Any:
        if next(left, None) is None:
            raise MemoryError("no room")
        return call(*args)

    return failing_late


@pytest.mark.timeout(240)
@pytest.mark.guarantee("all-or-none", fault="a rank of the trainer fails among four")
def test_four_ranks_gather(tmp_path: Path) -> None:
    ranks.run(gather, tmp_path, WORLD, COLLECTIVE_TIMEOUT_S)
