"""Which ranks of a larger job update together, and how long they wait for their leader."""

import os
import pickle
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from sgl_fp8rl.protocol.manifest import ManifestError
from tests.sgl_fp8rl.receiver import toy
from tests.trainer_bridge import ranks
from tests.trainer_bridge.test_begin import Slow
from tests.trainer_bridge.test_fsdp import sent, toy_model, toy_trainer
from tests.trainer_bridge.test_update import engine_of
from trainer_bridge.ranks import collective
from trainer_bridge.ranks.collective import Leader, check_ranks, ranks_of
from trainer_bridge.sources import parameters
from trainer_bridge.sources.parameters import named_tensors
from trainer_bridge.updates.update import RUN, update

WORLD = 4
SHORT_S = 8
"""Timeout of the trainer's own collectives: requests in flight may take longer to finish."""


def of_all_kinds(rank: int) -> None:
    """Ranks 2 and 3 hold the policy and the others a reward model, say, which take no part; a mesh
    of two dimensions; and DDP, of which every rank has all weights, and one of them sends."""
    tensors = toy.checkpoint()
    some = DeviceMesh("cpu", [2, 3])
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for first, weights in (
        (2, rank > 1 and toy_trainer(tensors, some)),
        (0, toy_trainer(tensors, grid)),
        (0, DistributedDataParallel(toy_model(tensors).requires_grad_(True))),
    ):
        engine = Slow(engine_of(1).ranks) if rank == first else None
        if engine is not None and first:
            engine.takes_s = SHORT_S + 4.0
        assert not weights or sent(weights, tensors, engine, version=0).bytes > 0


def in_a_group(rank: int) -> None:
    """Tensors that say nothing of ranks, as a framework gathers them itself."""
    group = dist.new_group([1, 2])
    if rank in (1, 2):
        tensors = toy.checkpoint()
        engine = engine_of(1) if rank == 1 else None
        assert sent(tensors, tensors, engine, version=0, group=group).bytes > 0
        with pytest.raises(RuntimeError, match="a fault of the leader"):
            leader = Leader((1, 2))
            leader.attempt(fail)
            leader.share(None)
        alone = Leader((1, 2))
        if rank == 1:  # and rank 2 failed before
            alone.share("old")
        assert Leader((1, 2)).share("new" if rank == 1 else None) == "new"


def fail() -> None:
    raise RuntimeError("a fault of the leader")


def one_rank_asks_for_something_else(rank: int) -> None:
    """The first or another one: all end with its sentence, and are in step at the next update."""
    tensors = toy.checkpoint()
    engine = engine_of(1) if rank == 0 else None
    good: dict[str, Any] = {"version": 0, "run": "a", "in_flight": "abort"}
    faults: list[tuple[dict[str, Any], str]] = [
        ({"version": -1}, "version.*whole number"),
        ({"version": object()}, "version.*whole number"),
        ({"run": ""}, "run is .*name"),
        ({"in_flight": "later"}, "in_flight is"),
        ({"version": 1}, "version [01] of run 'a'.*version [01] of run 'a'"),
        ({"run": "b"}, "run '[ab]'.*run '[ab]'"),
        ({"in_flight": "finish"}, "in_flight='finish'"),
    ]
    for at in (0, 2):
        for fault, sentence in faults:
            with pytest.raises(ManifestError, match=sentence):
                mine = good | (fault if rank == at else {})
                update(tensors, engine, group=dist.group.WORLD, **mine)
    assert engine is None or engine.ops == []
    result = sent(tensors, tensors, engine, group=dist.group.WORLD, **good)
    assert (result.run, result.version) == ("a", 0)
    # a run that nobody names, or the first rank alone, is that of the first on all
    for run in (None, "c" if rank == 0 else None):
        runs: list[Any] = [None] * WORLD
        result = update(tensors, engine, group=dist.group.WORLD, version=1, run=run)
        dist.all_gather_object(runs, (result.run, run or RUN))
        assert [told for told, _ in runs] == [runs[0][1]] * WORLD


def the_first_rank_fails_before_the_other_calls(rank: int) -> None:
    """It waits for nobody, and the other one hears of it."""
    some, store = dist.new_group([1, 2]), _get_default_store()
    if rank == 2:
        store.wait(["raised"])
    if rank in (1, 2):
        with pytest.raises(ManifestError, match="version is -1"):
            update(toy.checkpoint(), None, version=-1 if rank == 1 else 0, group=some)
        store.set("raised", "")
        assert Leader((1, 2)).share("next" if rank == 1 else "") == "next", "they are in step"


def one_rank_has_something_else_than_tensors(rank: int) -> None:
    """Or a stream: all end with its sentence, and are in step at the next update."""
    tensors, mesh, both = toy.checkpoint(), DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])
    engine = engine_of(1) if rank == 1 else None
    outside: dict[str, Any] = {"norm.weight": distribute_tensor(torch.ones(2), mesh)}
    some = dist.new_group([1, 2])
    sharded = {name: distribute_tensor(tensor, both) for name, tensor in tensors.items()}
    for at, whole in product((1, 2), (tensors, sharded)):
        for wrong, sentence in (
            (["norm.weight"], "unpack"),
            ({**tensors, **outside}, "0, 1"),
            (iter(tensors.items()), "1 pass an iterator and 1 a model"),
        ):
            if rank in (1, 2):
                mine = wrong if rank == at else whole
                with pytest.raises((ManifestError, ValueError), match=sentence):
                    update(mine, engine, version=0, group=some)
    assert engine is None or engine.ops == []
    if rank in (1, 2):
        assert sent(tensors, tensors, engine, version=0, group=some).version == 0


def one_rank_cannot_list_its_tensors(rank: int) -> None:
    """Without ``group``: who the ranks are is known from what the model holds."""
    tensors, mesh = toy.checkpoint(), init_device_mesh("cpu", (WORLD,))
    model, engine = toy_trainer(tensors, mesh), engine_of(1) if rank == 0 else None

    def refuse(given: Any) -> Any:
        raise ManifestError("NaN in a shard")

    for at in (0, 2):
        with pytest.MonkeyPatch.context() as patch:
            if rank == at:
                patch.setattr(parameters, "named_tensors", refuse)
            with pytest.raises(ManifestError, match="NaN in a shard"):
                update(model, engine, version=0)
    assert engine is None or engine.ops == []
    sent(model, tensors, engine, version=0)


def outside_of_the_group(rank: int) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    named = named_tensors(toy_trainer(toy.checkpoint(), mesh))
    assert ranks_of(named, None) == (0, 1, 2, 3)
    some = dist.new_group([0, 1])
    if rank < 2:
        with pytest.raises(ManifestError, match="ranks 0, 1, 2, 3, and ranks 0, 1 update"):
            check_ranks(named, ranks_of(named, some))


def the_first_rank_alone_cannot_read(rank: int) -> None:
    """The others hear of it, whatever it is."""
    if rank > 1:
        dist.new_group([0, 1])
        return
    group = dist.new_group([0, 1])

    class LocalError(Exception):  # pickle cannot find it
        pass

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(toy.checkpoint().items()):
            if rank == 0 and number == 5:
                raise LocalError("out of memory")
            yield pair

    expected = LocalError if rank == 0 else RuntimeError
    with pytest.raises(expected, match="out of memory"):
        update(stream(), engine_of(1) if rank == 0 else None, version=0, group=group)


def one_rank_leaves_nothing_in_the_store(rank: int) -> None:
    groups = [dist.new_group([member]) for member in range(WORLD)]
    dist.barrier()
    store, engine = _get_default_store(), engine_of(1)
    counts = []
    for version in range(3):
        if rank == 0:  # the others' keys would be counted
            update(toy.checkpoint(version), engine, version=version, group=groups[0])
            counts.append(store.num_keys())
    assert len(set(counts)) == (1 if rank == 0 else 0)


class Payload:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("import os; os.environ['RUN_BY_AN_OUTSIDER'] = ''",)


def an_outsider_writes_to_the_store(rank: int) -> None:
    """Nothing that it writes is run, and the ranks are in step at the next call."""
    if rank not in (1, 2):
        return
    store, written = _get_default_store(), pickle.dumps(Payload())
    for call in ("share", "collect"):
        leader, reader = Leader((1, 2)), 2 if call == "share" else 1
        if rank == reader:
            store.set(f"{leader._name}/0" + ("/1" if call == "collect" else ""), written)
            with pytest.raises(ValueError, match="let nobody else reach the store"):
                getattr(leader, call)(None)
    assert "RUN_BY_AN_OUTSIDER" not in os.environ
    assert Leader((1, 2)).share("next" if rank == 1 else "") == "next"


CASES = [
    an_outsider_writes_to_the_store,
    the_first_rank_fails_before_the_other_calls,
    the_first_rank_alone_cannot_read,
    one_rank_leaves_nothing_in_the_store,
    of_all_kinds,
    in_a_group,
    one_rank_asks_for_something_else,
    one_rank_has_something_else_than_tensors,
    one_rank_cannot_list_its_tensors,
    outside_of_the_group,
]


@pytest.mark.parametrize(
    ("size", "fast_s", "slow_s"), [(2, 0.0001, 0.02), (64, 0.00128, 0.02), (2000, 0.04, 0.04)]
)
def test_the_store_answers_so_many_checks(
    size: int, fast_s: float, slow_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many ranks there are; and who never comes is waited for as long as is said."""
    leader, now, waits = Leader(()), [0.0], []
    leader.size = size
    monkeypatch.setattr(collective.time, "monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(collective.time, "sleep", sleep)
    with pytest.raises(TimeoutError, match="nobody came for 5 s"):
        leader._wait(lambda: False, "nobody came", 5.0)
    assert waits[0] == pytest.approx(fast_s) and waits[-1] == pytest.approx(slow_s)
    assert now[0] == pytest.approx(5.0, abs=0.05)


@pytest.mark.guarantee(
    "all-or-none", fault="ranks of a part of a job, whose leader is slow, fails or runs ahead"
)
@pytest.mark.timeout(180)
def test_ranks_that_update_together(tmp_path: Path) -> None:
    """All cases in one job: four processes take seconds to start."""
    ranks.run(all_cases, tmp_path, WORLD, SHORT_S)


def all_cases(rank: int, folder: Path) -> None:
    for case in CASES:
        case(rank)
        ranks.meet(rank, folder, case.__name__, WORLD)
