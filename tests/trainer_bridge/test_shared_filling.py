"""Ranks that lay what they hold into one bucket: nothing of it is gathered."""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from sgl_fp8rl.protocol.states import State
from tests.sgl_fp8rl.weight_update import toy
from tests.sgl_fp8rl.weight_update.fake_engine import FakeEngine
from tests.trainer_bridge import ranks
from trainer_bridge import shared_filling
from trainer_bridge.packer import HostPacker
from trainer_bridge.shard_ranges import assign, held_here
from trainer_bridge.shared_filling import SharedFilling
from trainer_bridge.update import update

WORLD = 4
COLLECTIVE_TIMEOUT_S = 30
SMALL = 2 * 128 * 256 * 2
"""A slot holds 128 rows of the widest matrix, so that all ranks fill a part of most chunks."""


def test_each_element_is_laid_in_once() -> None:
    halves, replicas = [[(0, 4)], [(4, 8)]], [[(0, 8)], [(0, 8)]]
    assert assign(halves, [8]) == [{0: (0, 4), 1: (4, 8)}]
    assert assign(halves[::-1], [8]) == [{0: (4, 8), 1: (0, 4)}]
    assert assign(replicas, [8]) == [{0: (0, 8)}]
    assert assign([*halves, *halves], [8]) == [{0: (0, 4), 1: (4, 8)}]
    assert assign([[(0, 8)], [(0, 0)]], [8]) == [{0: (0, 8)}]


@pytest.mark.parametrize(
    "held",
    [
        [[(0, 4)], [(5, 8)]],
        [[(0, 5)], [(4, 8)]],
        [[(0, 4)], [(4, 7)]],
        [[(1, 4)], [(4, 8)]],
        [[None], [None]],
        [[(0, 4)], [None]],
    ],
)
def test_what_does_not_cover_a_parameter_is_gathered(held: Any) -> None:
    assert assign(held, [8]) == [None]


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


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except BaseException as error:  # noqa: BLE001  (whatever it is, it is compared)
        return f"{type(error).__name__}: {error}"
    return ""


def outcome(named: dict[str, torch.Tensor], engine: Any, version: int) -> str:
    """The error of an update, the same on every rank."""
    found = error_of(partial(update, named, engine, version=version))
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


def fill(rank: int, folder: Path) -> None:
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
            matrices = [n for n, t in tensors.items() if t.dim() > 1]
            assert len(gathers) == (len(matrices) if name == "columns" else 0), name
            version += 1

    mesh = meshes()["fsdp"][0]
    tensors = toy.checkpoint(version)
    named = distributed(tensors, mesh, (Shard(0),))
    if rank == 0:  # the two halves of the work: it holds some of each parameter
        held = held_here(list(named.items()))
        assert held[0] == (0, 75 * toy.HIDDEN)

    # a rank fails in the middle; the next update is whole again
    put, late = HostPacker.put, {"left": 5}

    def failing(self: HostPacker, *args: Any) -> None:
        late["left"] -= 1
        if late["left"] < 0:
            raise MemoryError("no room")
        put(self, *args)

    for broken in (2, 0):
        late["left"] = 5
        if rank == broken:
            HostPacker.put = failing  # type: ignore[method-assign]
        found = outcome(named, engine, version)
        assert ("rank 2 of the trainer" in found) if broken else ("no room" in found), found
        HostPacker.put = put  # type: ignore[method-assign]
        assert engine is None or engine.ranks[0].state is State.QUARANTINED
        assert not outcome(named, engine, version)
        assert engine is None or engine.holds(tensors)
        version += 1

    # also one that fails before it writes: its own error, and the others are told at once
    read = SharedFilling.read
    for broken in (2, 0):
        for fault in (MemoryError("no memory"), KeyboardInterrupt()):
            if rank == broken:
                SharedFilling.read = refuse(fault)  # type: ignore[method-assign]
            began = time.monotonic()
            found = error_of(partial(update, named, engine, version=version))
            assert time.monotonic() - began < COLLECTIVE_TIMEOUT_S
            told = "rank 2 of the trainer could not" if broken else str(fault) or "ended by Keyb"
            assert (type(fault).__name__ if rank == broken else told) in found, found
            SharedFilling.read = read  # type: ignore[method-assign]
            dist.barrier()
            assert not outcome(named, engine, version)
            assert engine is None or engine.holds(tensors)
            version += 1

    # what the engine refuses is not waited for
    bad = {n: t * float("nan") if n == "norm.weight" else t for n, t in tensors.items()}
    named_bad = distributed(bad, mesh, (Shard(0),))
    assert "NaN" in outcome(named_bad, engine, version)

    # a rank that cannot open the bucket, as on another host: then weights are gathered
    for fault in (FileNotFoundError("elsewhere"), ValueError("cannot mmap an empty file")):
        version += 1
        if rank == 3:
            shared_filling.open_board = refuse(fault)
        gathers.clear()
        assert not outcome(named, engine, version)
        assert len(gathers) == len(tensors)
        assert engine is None or engine.holds(tensors)


def refuse(fault: BaseException) -> Any:
    def refused(*_: Any) -> Any:
        raise fault

    return refused


@pytest.mark.timeout(240)
@pytest.mark.guarantee("all-or-none", fault="a rank of the trainer fails among four")
def test_four_ranks_fill_one_bucket(tmp_path: Path) -> None:
    ranks.run(fill, tmp_path, WORLD, COLLECTIVE_TIMEOUT_S)
