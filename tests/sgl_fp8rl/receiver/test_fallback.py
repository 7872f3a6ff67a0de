"""What a loader does that is not a copy of a box: these tensors go through it at each update."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sgl_fp8rl.receiver.routes.route_tracer import record_routes
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.test_route_tracer import SHAPES, bf16_storage, doing, routed
from tests.sgl_fp8rl.receiver.toy import BF16, Model, Weights


def test_in_a_thread_pool_the_right_tensor_falls_back() -> None:
    def load(model: Model, weights: Weights) -> None:
        def one(name: str, weight: torch.Tensor) -> None:
            model.data(name).copy_(weight + 1 if name == "a" else weight)

        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(one, *pair) for pair in weights]:
                future.result()

    table = record_routes(Model(bf16_storage(), load), SHAPES)
    assert set(table.fallback) == table.by_loader == {"a"}
    assert routed(table) == {"b", "n"}


def test_sources_that_are_concatenated_and_cut_all_fall_back() -> None:
    def load(model: Model, weights: Weights) -> None:
        kept = dict(weights)
        model.data("n").copy_(kept.pop("n"))
        whole = torch.cat([kept["a"], kept["b"]])
        model.data("ab").copy_(whole[:])

    parameters = {"ab": torch.zeros(512, 128, dtype=BF16), "n": torch.zeros(4, dtype=BF16)}
    table = record_routes(Model(parameters, load), {"a": (256, 128), "b": (256, 128), "n": (4,)})
    assert set(table.fallback) == {"a", "b"}
    assert table.by_loader == {"ab"}
    assert routed(table) == {"n"}


def test_what_a_loader_keeps_while_another_tensor_fails_is_offered_again() -> None:
    def load(model: Model, weights: Weights) -> None:
        kept: toy.Tensors = {}
        for name, weight in weights:
            if name == "n":
                model.data(name).fill_(weight.sum().item())
            kept[name] = weight
        for name, weight in kept.items():
            model.data(name).copy_(weight)

    table = record_routes(
        Model(bf16_storage(), load), {"a": (256, 128), "n": (4,), "b": (256, 128)}
    )
    assert set(table.fallback) == {"n"}
    assert routed(table) == {"a", "b"}


FALLS_BACK: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "item": lambda p, w: p.fill_(w[0].item()),
    "arithmetic": lambda p, w: p.copy_(w + 1),
    "in place": lambda p, w: p.copy_(w.add_(1)),
    "flipped": lambda p, w: p.copy_(w.flip(0)),
    "strided": lambda p, w: p[::2].copy_(w[::2]),
    "broadcast": lambda p, w: p.copy_(w[:1]),
    "temporary": lambda p, w: p.copy_(torch.empty(4).copy_(w)),
    "added": lambda p, w: p.add_(w),
    "stacked": lambda p, w: p.copy_(torch.stack([w, w])[0]),
    "reinterpreted": lambda p, w: p.copy_(w.view(torch.float16)),
    "restrided": lambda p, w: p.copy_(w.as_strided((4,), (1,))),
    "selected": lambda p, w: p.copy_(w[torch.tensor([3, 2, 1, 0])]),
}
OF_A_MATRIX: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "transposed": lambda p, w: p.copy_(w.t()),
    "transposed whole": lambda p, w: p.copy_(w.t().contiguous()),
    "no dimension in common": lambda p, w: p.view(-1).copy_(w.view(-1)),
    "no view of a probe": lambda p, w: p.view(-1).copy_(w[:, :2].contiguous().view(-1)),
}


@pytest.mark.parametrize("name", FALLS_BACK | OF_A_MATRIX)
def test_what_is_no_copy_of_a_box_falls_back(name: str, caplog: pytest.LogCaptureFixture) -> None:
    storage, shapes = bf16_storage(), dict(SHAPES)
    if name in OF_A_MATRIX:
        storage["n"], shapes["n"] = torch.zeros(2, 6, dtype=BF16), (6, 2)
    with caplog.at_level(logging.WARNING):
        table = record_routes(Model(storage, doing((FALLS_BACK | OF_A_MATRIX)[name])), shapes)
    assert set(table.fallback) == {"n"}
    assert table.by_loader == {"n"}
    assert [r.getMessage().split()[0] for r in caplog.records] == ["n"]


@pytest.mark.parametrize("way", ["out", "in place"])
def test_a_tensor_derived_from_a_parameter_falls_back(way: str) -> None:
    """GemmaRMSNorm keeps weight + 1 beside the weight; routes alone would leave it stale."""

    def load(model: Model, weights: Weights) -> None:
        for name, weight in weights:
            model.data(name).copy_(weight)
            if name == "n" and way == "out":
                torch.add(model.data(name), 1.0, out=model.get_buffer("plus_one"))
            elif name == "n":
                model.get_buffer("plus_one").copy_(model.data(name)).add_(1.0)

    model = Model(bf16_storage(), load)
    model.register_buffer("plus_one", torch.zeros(4, dtype=BF16))
    table = record_routes(model, SHAPES)
    assert set(table.fallback) == {"n"}
    assert "plus_one" in table.fallback["n"]
    assert table.by_loader == {"n"}
