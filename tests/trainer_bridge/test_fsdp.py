"""FSDP2 trainers: two gloo processes gather, rank 0 sends, and both hear of every failure."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge import ranks
from tests.trainer_bridge.test_hf_names import planned, streamed
from tests.trainer_bridge.test_sender import layout
from tests.trainer_bridge.test_update import SMALL, engine_of, holds
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.ranks.collective import ranks_of
from trainer_bridge.sources import tied_head
from trainer_bridge.sources.parameters import named_tensors, sources
from trainer_bridge.updates.update import UpdateResult, update

WORLD = 2
COLLECTIVE_TIMEOUT_S = 30
"""A rank that is left waiting fails after this, and its test with it."""

run = partial(ranks.run, world=WORLD, collective_timeout_s=COLLECTIVE_TIMEOUT_S)


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def failure(call: Callable[[], object]) -> tuple[str, str, Any]:
    """The error of a call on this rank, which must be that of every rank."""
    try:
        call()
    except Exception as error:  # noqa: BLE001  (whatever it is, it is compared)
        found = (type(error).__name__, str(error), getattr(error, "status", None))
    else:
        found = ("nothing was raised", "", None)
    everywhere = gathered(found)
    assert everywhere == [found] * WORLD, everywhere
    return found


def toy_model(tensors: toy.Tensors) -> nn.Module:
    return toy.Model({n: t.clone() for n, t in tensors.items()}, lambda model, weights: None)


def sharded(model: Any, **options: Any) -> Any:
    """A transformer, by FSDP2: its blocks, then what is left."""
    for layer in model.model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def toy_trainer(tensors: toy.Tensors, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    """By FSDP2, as it shards a transformer: its blocks, then what is left."""
    model = toy_model(tensors)
    for block in ("attn", "mlp"):
        fully_shard(model.get_submodule(block), mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def sent(weights: Any, tensors: toy.Tensors, engines: Any, **options: Any) -> UpdateResult:
    """An update after which the engines of the first rank hold these tensors."""
    result = update(weights, engines, **options)
    for engine in engines if isinstance(engines, list) else [engines]:
        assert engine is None or holds(engine, tensors)
    return result


def update_toy(rank: int, folder: Path) -> None:
    """Updates and failures of one engine, one after the other."""
    engine = engine_of(2, SMALL) if rank == 0 else None
    tensors, other = toy.checkpoint(), toy.checkpoint(1)
    model = toy_trainer(tensors)
    assert ranks_of(named_tensors(model), None) == (0, 1)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    first, second = gathered(sent(model, tensors, engine, version=0))
    assert isinstance(second, UpdateResult)
    assert (first.tensors, first.bytes) == (second.tensors, second.bytes)

    # DTensors by name, as a framework that renames its parameters sends them
    named = dict(toy_trainer(other).named_parameters())
    sent(named, other, engine, version=1)

    # refused before anything is written
    name, sentence, status = failure(lambda: update(model, engine, version=1))
    assert (name, status) == ("EngineError", 400) and "version 1 is not newer" in sentence
    some = {n: t for n, t in named.items() if n != "norm.weight"}
    known = layout(state="serving", bucket_bytes=1 << 20)
    faults: list[tuple[Any, Any, int, str]] = [
        (some, engine, 2, "missing: norm.weight"),
        (model, engine, -1, "whole number"),
        (model, object(), 2, "is not an engine"),
        (model, "host:1", 2, "is not an address"),
        *(
            (model, Mock(control=Mock(side_effect=[known, *[fault] * 9])), 2, str(fault))
            for fault in (KeyError("op"), ValueError("unknown"), EngineError("gone", 502))
        ),
    ]
    for weights, engines, version, why in faults:
        found = failure(partial(update, weights, engines, version=version))
        assert why in found[1], found
    assert engine is None or holds(engine, other)

    # failed while it was written; the other ranks still gather to the end
    with torch.no_grad():
        local = model.get_parameter("attn.q.weight")
        assert isinstance(local, DTensor)
        local.to_local()[-1, -1] = float("nan") if rank == 1 else 1.0
    name, sentence, _ = failure(lambda: update(model, engine, version=2))
    assert name == EngineError.__name__ and "attn.q.weight holds NaN or Inf" in sentence
    assert engine is None or {w.state.value for w in engine.ranks} == {"quarantined"}
    sent(named, other, engine, version=2)

    # a stream in which both ranks gather, as frameworks have it
    def stream(*extra: tuple[str, Any], whole: bool = True) -> Iterator[tuple[str, Any]]:
        for name, tensor in (*reversed(named.items()), *extra):
            yield name, tensor.full_tensor() if whole else tensor

    everyone = dist.group.WORLD
    for version in (3, 4):
        sent(stream(whole=version == 3), other, engine, version=version, group=everyone)
    norm = named["norm.weight"]
    for version, extra in ((4, ()), (5, (("unknown", norm),)), (5, (("norm.weight", norm),))):
        streamed = stream(*extra)
        found = failure(partial(update, streamed, engine, version=version, group=everyone))
        assert found[0] != "nothing was raised"
    sent(stream(), other, engine, version=6, group=everyone)
    # two engines at once, of which one has dummy weights and so another plan
    engines = None
    if engine is not None:
        dummy = [EngineWeights(toy.toy(r, 2), toy.BF16) for r in range(2)]
        engines = [engine, FakeEngine(dummy, SMALL)]
    for version, weights in ((7, toy_trainer(other)), (8, named), (9, stream())):
        group = everyone if version == 9 else None
        results = gathered(sent(weights, other, engines, version=version, group=group))
        assert [(each.version, each.failed) for each in results] == [(version, {})] * 2
    found = failure(lambda: update(named, engines and [*engines, object()], version=10))
    assert "is not an engine" in found[1]
    if rank == 0:  # which would be a leader of its own
        with pytest.raises(ManifestError, match="pass group="):
            update(iter(named.items()), engine, version=10)


def update_tied(rank: int, folder: Path) -> None:
    """A head that is the embedding is taken, and one that is not on one rank is refused on all; so
    is what cannot be read on one."""
    engine, tensors = engine_of(2, SMALL) if rank == 0 else None, toy.checkpoint()
    if engine is not None:
        engine.tied = list(toy.SHAPES["embed.weight"])
    named: dict[str, torch.Tensor] = dict(toy_trainer(tensors).named_parameters())
    embed = named["embed.weight"]
    assert isinstance(embed, DTensor)
    mesh = embed.device_mesh
    across = embed.detach().redistribute(mesh, [Shard(1)])
    heads = (embed, embed.detach().clone(), across, tensors["embed.weight"].clone())
    for version, head in enumerate(heads):
        result = sent({**named, "lm_head.weight": head}, tensors, engine, version=version)
        assert result.tensors == len(named)

    other = embed.detach().clone()
    assert isinstance(other, DTensor)
    if rank == 1:
        other.to_local()[-1, -1] += 1
    both = {**named, "lm_head.weight": other}
    for weights, group in ((both, None), (iter(both.items()), dist.group.WORLD)):
        found = failure(partial(update, weights, engine, version=9, group=group))
        assert found[:2] == (ManifestError.__name__, tied_head.UNLIKE)
    update(named, engine, version=9)

    norm = named["norm.weight"]
    assert isinstance(norm, DTensor)
    local = norm.to_local().detach().clone()
    if rank == 1:
        local.untyped_storage().resize_(0)
    freed = DTensor.from_local(local, mesh, norm.placements, run_check=False)
    found = failure(lambda: update({**named, "norm.weight": freed}, engine, version=10))
    assert "on rank 1: norm.weight has no data here" in found[1]
    assert engine is None or {w.state.value for w in engine.ranks} == {"serving"}
    assert engine is None or holds(engine, tensors)


@pytest.mark.timeout(180)
def test_a_sharded_model_updates_an_engine_and_every_rank_hears_how(tmp_path: Path) -> None:
    run(update_toy, tmp_path)


def plain_engine(tensors: toy.Tensors) -> FakeEngine:
    """An engine that keeps each HF tensor in BF16 under its own name."""

    def load(model: toy.Model, weights: toy.Weights) -> None:
        for name, weight in weights:
            model.data(name).copy_(weight)

    storage = {n: torch.zeros(t.shape, dtype=toy.BF16) for n, t in tensors.items()}
    shapes = {n: tuple(t.shape) for n, t in tensors.items()}
    return FakeEngine([toy.engine(toy.Model(storage, load), shapes)], 1 << 16)


def keep_on_one_rank(rank: int, folder: Path) -> None:
    """A DTensor over a mesh of one rank is whole there, as in a replicated model."""
    mesh = init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("replica", "shard"))
    whole = torch.arange(12.0).view(4, 3)
    here = distribute_tensor(whole, mesh["shard"], [Shard(0)])
    named = named_tensors({"w": here})
    assert [type(tensor) for _, tensor in named] == [torch.Tensor]
    assert torch.equal(named[0][1], whole)
    assert not ranks_of(named, None)
    spread = distribute_tensor(whole, mesh["replica"], [Shard(0)])  # the control
    assert ranks_of(named_tensors({"w": spread}), None) == (0, 1)
    assert torch.equal(streamed({"w": spread}, torch.float32)["w"], whole)


def step_behind_a_forward(rank: int, folder: Path) -> None:
    """FSDP2 leaves the root's parameters whole after a forward, and the optimizer steps shards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    mesh = init_device_mesh("cpu", (WORLD,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        model(torch.ones(2, 4))
    before = {name: whole(tensor) for name, tensor in model.named_parameters()}
    assert not isinstance(model[1].weight, DTensor), "FSDP2 reshards: the test shows nothing"
    optimizer.step()
    for name, tensor in named_tensors(model):
        assert isinstance(tensor, DTensor)
        assert not torch.equal(whole(tensor), before[name]), f"{name} is as before the step"


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("worker", [update_tied, keep_on_one_rank, step_behind_a_forward])
def test_two_ranks(worker: Callable[[int, Path], None], tmp_path: Path) -> None:
    run(worker, tmp_path)


# -- one process


def test_announced_shapes_and_dtypes_are_those_that_are_sent() -> None:
    tensors = {
        "w": torch.randn(4, 6),
        "v": torch.randn(6),
        "half": torch.randn(2, 3).half(),
        "codes": torch.ones(128, 128).to(toy.FP8),
        "codes_scale_inv": torch.ones(1, 1),
    }
    found = planned(tensors, toy.BF16)
    announced = {n: (t.dtype, t.shape) for s in found for n, t in s.announce(s.sent_as)}
    sent = {name: (t.dtype, t.shape) for name, t in streamed(tensors, toy.BF16).items()}
    assert announced == sent
    dtypes = dict.fromkeys(tensors, toy.BF16)
    dtypes |= {"codes": toy.FP8, "codes_scale_inv": torch.float32}
    assert {n: dtype for n, (dtype, _) in sent.items()} == dtypes
    held = {n: t.dtype for s in found for n, t in s.announce(s.held_as)}
    assert held == {name: tensor.dtype for name, tensor in tensors.items()}
    assert not ranks_of(named_tensors(tensors), None)
    assert not ranks_of(named_tensors(nn.Linear(2, 2)), None)


def test_a_parameter_is_read_where_it_lies() -> None:
    """In its own dtype and, where it is contiguous, its own memory; never with its gradient."""
    held = nn.Parameter(torch.randn(6, 4))
    turned = held.detach().t()
    in_place, copied = sources([("w", held), ("t", turned)], None, toy.BF16)
    whole = in_place.read(held)
    assert (whole.dtype, whole.data_ptr()) == (torch.float32, held.data_ptr())
    assert not whole.requires_grad
    assert copied.read(turned).is_contiguous()
    assert torch.equal(copied.read(turned), turned)


def test_names_come_without_what_wrappers_add() -> None:
    model = nn.ModuleDict({"_orig_mod": nn.Linear(2, 4)})
    assert [name for name, _ in named_tensors(model)] == ["weight", "bias"]
    pairs = [("_orig_mod.w", torch.ones(2))]  # given by name, a name is the HF name
    for given in (pairs, dict(pairs), iter(pairs)):
        assert [name for name, _ in named_tensors(given)] == ["_orig_mod.w"]


def test_scales_come_behind_their_weight() -> None:
    """Else every weight of a checkpoint whose scales come last would wait in memory for them."""
    in_order = "a a_scale_inv b c c_scale_inv"
    orders = in_order, "a b c a_scale_inv c_scale_inv", "c_scale_inv a_scale_inv a b c"
    for order in orders:
        dtypes = {True: torch.float32, False: torch.float8_e4m3fn}
        pairs = [(n, torch.ones(2).to(dtypes[n.endswith("_inv")])) for n in order.split()]
        for given in (pairs, dict(pairs), iter(pairs)):
            found = named_tensors(given)
            assert [name for name, _ in found] == in_order.split()
            held = dict(pairs)
            assert all(tensor is held[name] for name, tensor in found)
    # the control: what only sounds like scales stays, and so do other weights
    names = ["b_scale_inv", "a_scale_inv", "z", "a", "_scale_inv", "a_scale"]
    assert [name for name, _ in named_tensors({n: torch.ones(2) for n in names})] == names


def test_what_a_module_holds_comes_once() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 4), "b": nn.Sequential(nn.Linear(4, 4))})
    model["shared"] = model["b"]
    model["a"].register_parameter("none", None)
    model["a"].register_buffer("none_either", None)
    model["a"].register_parameter("tied", model["b"][0].weight)
    found, wanted = named_tensors(model), list(model.named_parameters())
    assert [name for name, _ in found] == [name for name, _ in wanted]
    assert all(one is other for (_, one), (_, other) in zip(found, wanted, strict=True))
    model["b"][0].register_buffer("last", torch.ones(1))
    assert [name for name, _ in named_tensors(model)][-1] == "b.0.last"


def test_buffers_that_a_checkpoint_holds_are_sent() -> None:
    model = nn.Linear(2, 4)
    model.register_buffer("router_bias", torch.ones(4))
    model.register_buffer("inv_freq", torch.ones(4), persistent=False)
    model.register_buffer("steps", torch.tensor(3))
    found = streamed(model, torch.float32)
    assert set(found) == {"weight", "bias", "router_bias"}
    assert not any(tensor.requires_grad for tensor in found.values())
