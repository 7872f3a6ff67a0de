"""Every placement that FSDP2 and tensor parallelism give parameters: which engines read in place,
as they are or as codes, and which are gathered, as docs/scale.md has it.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from sgl_fp8rl.protocol.states import State
from tests.sgl_fp8rl.receiver import toy
from tests.trainer_bridge import fake_ipc, ranks
from tests.trainer_bridge.shards_job import (
    CODED,
    Elsewhere,
    GpuEngine,
    counted_gathers,
    mapped_bytes,
)
from tests.trainer_bridge.test_fsdp import toy_trainer
from tests.trainer_bridge.test_update import SMALL, engine_of, failing, holds
from trainer_bridge.shards.placed_shards import assign, held_here
from trainer_bridge.sources.parameters import Source
from trainer_bridge.transfer.packer import HostPacker
from trainer_bridge.updates.update import update

WORLD = 4
COLLECTIVE_TIMEOUT_S = 30
UPDATES = 3
"""The second one, and those after it, read in place."""
COLUMNS = {name for name in toy.SHAPES if name.endswith(("attn.o.weight", "down.weight"))}
"""What tensor parallelism cuts by columns (``RowwiseParallel``): the inputs of these layers."""
WHOLE = {"norm.weight", "mlp.router.weight"}
"""What it leaves whole on every rank."""
Named = dict[str, torch.Tensor]


@pytest.mark.parametrize(
    ("held", "owners"),
    [
        (((0, 4), (4, 8)), {0: (0, 4), 1: (4, 8)}),
        (((4, 8), (0, 4)), {0: (4, 8), 1: (0, 4)}),
        (((0, 8), (0, 8)), {0: (0, 8)}),
        (((0, 4), (4, 8)) * 2, {0: (0, 4), 1: (4, 8)}),
        (((0, 8), (0, 0)), {0: (0, 8)}),
        # what does not cover a parameter of 8 is gathered
        *((held, None) for held in (((0, 4), (5, 8)), ((0, 5), (4, 8)), ((0, 4), (4, 7)))),
        *((held, None) for held in (((1, 4), (4, 8)), (None, None), ((0, 4), None))),
    ],
)
def test_each_element_is_laid_in_once(held: Any, owners: Any) -> None:
    assert assign([[each] for each in held], [8]) == [owners]


def sharded(tensors: Named, mesh: DeviceMesh, **options: Any) -> Named:
    return dict(toy_trainer(tensors, mesh, **options).named_parameters())


def parallel(tensors: Named, mesh: DeviceMesh) -> Named:
    """As ``ColwiseParallel`` and ``RowwiseParallel`` leave a model."""
    return {
        name: tensor
        if name in WHOLE
        else distribute_tensor(tensor, mesh, (Shard(1 if name in COLUMNS else 0),))
        for name, tensor in tensors.items()
    }


def fsdp(tensors: Named) -> Named:
    return sharded(tensors, init_device_mesh("cpu", (WORLD,)))


def hsdp(tensors: Named) -> Named:
    return sharded(tensors, init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")))


def tp(tensors: Named) -> Named:
    return parallel(tensors, init_device_mesh("cpu", (WORLD,)))


def fsdp_over_tp(tensors: Named) -> Named:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    named = sharded(parallel(tensors, mesh["tp"]), mesh["dp"])
    rows, columns = (cast(DTensor, named[f"attn.{x}.weight"]).placements for x in "qo")
    assert (type(rows[0]), type(rows[1])) == (_StridedShard, Shard), "FSDP2 places them otherwise"
    assert columns == (Shard(0), Shard(1))
    return named


def distributed(tensors: toy.Tensors, mesh: DeviceMesh, placements: tuple[Any, ...]) -> Named:
    by_rows = (*(Shard(0) if isinstance(p, Shard) else p for p in placements),)
    return {
        name: distribute_tensor(tensor, mesh, placements if tensor.dim() > 1 else by_rows)
        for name, tensor in tensors.items()
    }


def square() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))


def rows_twice(tensors: Named) -> Named:
    return distributed(tensors, square(), (Shard(0), Shard(0)))


def replicas(tensors: Named) -> Named:
    return distributed(tensors, init_device_mesh("cpu", (WORLD,)), (Replicate(),))


def offloaded(tensors: Named) -> Named:
    """Shards that stay in host memory, pinned where there is a GPU."""
    policy = CPUOffloadPolicy(pin_memory=False)
    return sharded(tensors, init_device_mesh("cpu", (WORLD,)), offload_policy=policy)


def where_rows_are_cut_twice(rank: int, folder: Path) -> None:
    """By TP and by FSDP2: torch errs about where 7 rows lie, so nobody claims them."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    for rows, found in ((7, [None]), (12, [{0, 1, 2, 3, 4, 5}])):
        whole = torch.arange(rows * 3.0).view(rows, 3)
        model = nn.Linear(3, rows, bias=False)
        model.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], (Shard(0),)))
        fully_shard(model, mesh=mesh["dp"])
        (held,) = held_here(list(model.named_parameters()))
        if held is not None:
            local = cast(DTensor, model.weight).to_local().flatten()
            assert torch.equal(local, whole.flatten()[slice(*held)])
        of_ranks: list[Any] = [None] * 6
        dist.all_gather_object(of_ranks, [held])
        owners = assign(of_ranks, [whole.numel()])
        assert [each and {*each} for each in owners] == found


@pytest.mark.timeout(180)
def test_rows_are_claimed_by_who_holds_them(tmp_path: Path) -> None:
    ranks.run(where_rows_are_cut_twice, tmp_path, 6, COLLECTIVE_TIMEOUT_S)


class Kind(NamedTuple):
    """A way to hold a model on four ranks."""

    hold: Callable[[Named], Named]
    gathered: set[str]
    """What is not read in place."""
    plain: set[str]
    """What each rank holds whole."""
    on_gpu: bool = True
    coded: frozenset[str] = frozenset()
    """What is read as codes by an engine on other GPUs: shards are whole blocks."""


KINDS = (
    Kind(fsdp, set(), set()),
    Kind(hsdp, set(), set(), coded=frozenset(CODED)),
    Kind(tp, COLUMNS, WHOLE),
    Kind(fsdp_over_tp, COLUMNS, set()),
    Kind(offloaded, set(), set(), on_gpu=False),
    Kind(rows_twice, set(), set()),
    Kind(replicas, set(), set(), coded=frozenset(toy.FP8_NAMES)),
)


def moved(named: Named, memories: fake_ipc.Memories) -> Named:
    """The same shards, in memory that can be shared, as that of a GPU."""
    found: Named = {}
    for name, tensor in named.items():
        found[name] = tensor
        if isinstance(tensor, DTensor):
            local = tensor.to_local()
            content = memories.allocate(max(local.nbytes, 1))[: local.nbytes]
            shard = content.view(local.dtype).view(local.shape).copy_(local)
            found[name] = DTensor.from_local(
                shard,
                tensor.device_mesh,
                tensor.placements,
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
    return found


def become(named: Named, other: Named) -> None:
    """The optimizer's step: other values where they lie."""
    for name, tensor in named.items():
        here, there = (
            each.to_local() if isinstance(each, DTensor) else each for each in (tensor, other[name])
        )
        here.detach().copy_(there)


def follows(
    kind: Kind, engine: Any, memories: fake_ipc.Memories | None, is_elsewhere: bool = False
) -> None:
    """Updates of one engine, whose bytes are the oracle's after each: on a CPU, or with memories on
    the trainer's GPU, or elsewhere."""
    named = kind.hold(toy.checkpoint(0))
    if memories is not None and kind.on_gpu:
        named = moved(named, memories)
    spread = set(named) - kind.plain
    with pytest.MonkeyPatch.context() as patch:
        gathered = counted_gathers(patch)
        for version in range(UPDATES):
            where = kind.hold.__name__, memories is not None, is_elsewhere, version
            tensors = toy.checkpoint(version)
            become(named, kind.hold(tensors))
            gathered.clear()
            result = update(named, engine, version=version)
            assert engine is None or holds(engine, tensors), where
            reads = memories is not None and kind.on_gpu and version > 0
            wanted = kind.gathered if reads else spread
            assert sorted(gathered) == sorted(named[name].shape for name in wanted), where
            in_place = {n: t for n, t in tensors.items() if n in spread - kind.gathered and reads}
            coded = kind.coded if is_elsewhere and version > 1 else set()
            assert result.mapped_bytes == mapped_bytes(in_place, coded), where


def each_kind(rank: int, folder: Path) -> None:
    logging.disable(logging.CRITICAL)
    for kind in KINDS:
        follows(kind, engine_of(2, SMALL) if rank == 0 else None, None)
        ranks.meet(rank, folder, f"cpu-{kind.hold.__name__}", WORLD)
        for make in (GpuEngine, Elsewhere):
            with pytest.MonkeyPatch.context() as patch:
                memories, interpreter = fake_ipc.install(patch)
                engine = make(interpreter.writable) if rank == 0 else None
                follows(kind, engine, memories, make is Elsewhere)
            ranks.meet(rank, folder, f"{make is Elsewhere}-{kind.hold.__name__}", WORLD)


@pytest.mark.guarantee("all-or-none", fault="each placement of FSDP2 and tensor parallelism")
@pytest.mark.timeout(240)
def test_each_placement_leaves_the_oracles_bytes(tmp_path: Path) -> None:
    ranks.run(each_kind, tmp_path, WORLD, COLLECTIVE_TIMEOUT_S)


# -- faults


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


def where_a_rank_fails(rank: int, folder: Path) -> None:
    logging.disable(logging.CRITICAL)
    engine = engine_of(2, SMALL) if rank == 0 else None
    tensors, version = toy.checkpoint(), 0
    # the first rank fails in the middle: all hear of it, and the next update is whole again
    named = distributed(tensors, init_device_mesh("cpu", (WORLD,)), (Shard(0),))
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
def test_a_rank_of_four_fails(tmp_path: Path) -> None:
    ranks.run(where_a_rank_fails, tmp_path, WORLD, COLLECTIVE_TIMEOUT_S)
