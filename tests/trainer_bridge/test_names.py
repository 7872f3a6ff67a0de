"""One rule for names: whatever carries the weights, the same tensors are accepted and refused, in
the same words."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.states import State
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.sources import tied_head
from trainer_bridge.updates.update import update

pytestmark = pytest.mark.timeout(120)

HEAD, BUFFER = "lm_head.weight", "rotary.inv_freq"
EMBED = toy.SHAPES["embed.weight"]
Pairs = list[tuple[str, torch.Tensor]]


def engine_of(*, tied: bool) -> FakeEngine:
    """Of a checkpoint with a buffer that its loader does not keep; with a head, or with the
    embedding in its place."""
    model = toy.toy()
    load = model.loader
    model.loader = lambda m, weights: load(m, ((n, t) for n, t in weights if n != BUFFER))
    shapes = {**toy.SHAPES, BUFFER: (4,)}
    if not tied:
        model.lm_head = nn.Module()
        model.lm_head.weight = nn.Parameter(torch.zeros(EMBED, dtype=toy.BF16), requires_grad=False)
        shapes[HEAD] = EMBED
    weights = toy.engine(model, shapes)
    assert weights.table is not None
    weights.table.skipped = frozenset({BUFFER})
    engine = FakeEngine([weights], 1 << 18)
    engine.tied = list(EMBED) if tied else None
    return engine


def other(tensors: toy.Tensors) -> torch.Tensor:
    head = tensors["embed.weight"].clone()
    head[-1, -1] += 1
    return head


def with_head(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[toy.Tensors], Pairs]:
    return lambda tensors: [*tensors.items(), (HEAD, change(tensors["embed.weight"]))]


def not_this_models(names: str) -> str:
    return f"the names are not this model's ({names}); use those of the HF checkpoint"


CASES: dict[str, tuple[bool, Callable[[toy.Tensors], Pairs], str | None]] = {
    "tied": (True, lambda t: [*t.items()], None),
    "untied": (False, lambda t: [*t.items(), (HEAD, other(t))], None),
    "redundant": (True, with_head(torch.clone), None),
    "redundant, first": (True, lambda t: [(HEAD, t["embed.weight"].clone()), *t.items()], None),
    "redundant, in FP32": (True, with_head(torch.Tensor.float), None),
    "buffer": (True, lambda t: [*t.items(), (BUFFER, torch.ones(4))], None),
    "unlike": (True, lambda t: [*t.items(), (HEAD, other(t))], tied_head.UNLIKE),
    "of another shape": (
        True,
        with_head(lambda embedding: embedding[1:].clone()),
        f"{HEAD} has shape (299, 128), the engine's is (300, 128); send the whole tensor in the "
        f"checkpoint's layout",
    ),
    "no head": (False, lambda t: [*t.items()], not_this_models(f"missing: {HEAD}")),
    "unknown": (
        True,
        lambda t: [*t.items(), ("x", torch.ones(4))],
        not_this_models("unknown: x"),
    ),
    "missing": (
        True,
        lambda t: [pair for pair in t.items() if pair[0] != "norm.weight"],
        not_this_models("missing: norm.weight"),
    ),
    "doubled": (
        True,
        lambda t: [*t.items(), ("norm.weight", t["norm.weight"])],
        "norm.weight comes twice; send each tensor once",
    ),
    "doubled head": (
        True,
        lambda t: [*t.items(), *[(HEAD, t["embed.weight"].clone())] * 2],
        f"{HEAD} comes twice; send each tensor once",
    ),
}


def as_module(pairs: Pairs) -> nn.Module:
    return toy.Model({name: tensor.clone() for name, tensor in pairs}, lambda model, weights: None)


CARRIERS: dict[str, Callable[[Pairs], Any]] = {
    "module": as_module,
    "mapping": dict,
    "list": list,
    "iterator": iter,
    "generator": lambda pairs: (pair for pair in pairs),
}


@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
@pytest.mark.parametrize(
    ("carrier", "case"),
    [
        (carrier, case)
        for carrier in CARRIERS
        for case in CASES
        if "doubled" not in case or carrier not in ("module", "mapping")  # each name is there once
    ],
)
def test_every_carrier_is_held_to_the_same_names(carrier: str, case: str, later: bool) -> None:
    """In the first update of an engine, and behind one of the same carrier."""
    tied, bring, wanted = CASES[case]
    carry, engine = CARRIERS[carrier], engine_of(tied=tied)
    tensors = toy.checkpoint(1)
    if later:
        head: Pairs = [] if tied else [(HEAD, torch.ones(EMBED))]
        update(carry([*toy.checkpoint(0).items(), *head]), engine, version=0)
    if wanted is None:
        update(carry(bring(tensors)), engine, version=1)
        contents = toy.contents(engine.ranks[0].model)
        assert toy.same(
            {n: contents[n] for n in contents if n != HEAD}, toy.expected(tensors, 0, 1)
        )
        if not tied:
            assert torch.equal(engine.ranks[0].model.get_parameter(HEAD), other(tensors))
        return
    before = toy.contents(engine.ranks[0].model)
    with pytest.raises((ManifestError, EngineError)) as error:
        update(carry(bring(tensors)), engine, version=1)
    assert str(error.value) == wanted
    if carrier not in ("iterator", "generator"):  # a stream is known when it has come
        assert engine.ranks[0].state is State.SERVING
        assert toy.same(before, toy.contents(engine.ranks[0].model))


def test_a_head_that_is_the_embedding_is_not_read_or_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, tensors = engine_of(tied=True), toy.checkpoint(0)
    alone = update(tensors, engine, version=0)
    monkeypatch.setattr(torch, "equal", None)  # the same memory is not compared
    both = update({**tensors, HEAD: tensors["embed.weight"]}, engine, version=1)
    assert (both.tensors, both.bytes) == (alone.tensors, alone.bytes)


def test_rows_that_change_places_are_seen_in_a_stream() -> None:
    engine, tensors = engine_of(tied=True), toy.checkpoint(0)
    for moved in (tensors["embed.weight"].flip(0), tensors["embed.weight"].flip(1)):
        with pytest.raises(ManifestError, match="ties the two"):
            update(iter([*tensors.items(), (HEAD, moved)]), engine, version=0)


def test_a_stream_may_use_the_memory_of_the_embedding_again() -> None:
    engine, tensors = engine_of(tied=True), toy.checkpoint(0)
    memory = torch.empty(EMBED, dtype=toy.BF16)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            yield name, memory.copy_(tensor) if tensor.shape == memory.shape else tensor
        yield HEAD, memory.zero_()

    with pytest.raises(ManifestError, match="ties the two"):
        update(stream(), engine, version=0)


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (lambda t: t.to("meta"), "has no data here"),
        (lambda t: t.to_sparse(), "is not dense"),
        (lambda t: [1.0], "is a list"),
        (lambda t: nn.parameter.UninitializedParameter(), "is not initialized"),
        (lambda t: t.long(), ".*int64"),
        (lambda t: t.to(toy.FP8), ".*(matrices|announced)"),
        (lambda t: t[:2], r".*\(2,\)"),
    ],
)
@pytest.mark.parametrize("carrier", ["mapping", "list", "iterator"])
def test_what_cannot_be_read_is_named(
    carrier: str, break_it: Callable[[torch.Tensor], Any], why: str
) -> None:
    engine, tensors = engine_of(tied=True), toy.checkpoint(0)
    tensors["norm.weight"] = break_it(tensors["norm.weight"])
    with pytest.raises((ManifestError, EngineError), match=f"norm.weight {why}"):
        update(CARRIERS[carrier]([*tensors.items()]), engine, version=1)
    if carrier != "iterator":
        assert engine.ranks[0].state is State.SERVING


def freed(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def test_freed_memory_and_quantized_weights_are_named() -> None:
    layer = nn.Sequential(nn.Linear(128, 128, bias=False, dtype=toy.BF16))
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    engine, tensors = engine_of(tied=True), toy.checkpoint(0)
    for weight, why in (
        (freed(torch.ones(128, dtype=toy.BF16)), "has no data here"),
        (layer[0].weight, "values cannot be read"),
    ):
        with pytest.raises(ManifestError, match=f"norm.weight .*{why}"):
            update({**tensors, "norm.weight": weight}, engine, version=1)
        assert engine.ranks[0].state is State.SERVING
