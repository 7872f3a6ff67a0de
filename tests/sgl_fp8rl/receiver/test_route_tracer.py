"""Recording: which routes come out of SGLang-like loaders, and what a loader cannot do unseen."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
import torch

from sgl_fp8rl.formats import BLOCK_FP8, UNQUANTIZED
from sgl_fp8rl.receiver.routes.route_tracer import WriteWatch, record_routes
from sgl_fp8rl.receiver.routes.routes import Route, RouteError, RouteTable
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.toy import BF16, Model, Weights, fp8_storage

Loader = Callable[[Model, Weights], None]
SHAPES: toy.Shapes = {"a": (256, 128), "b": (256, 128), "n": (4,)}


def bf16_storage() -> toy.Tensors:
    return {name: torch.full(shape, 9.0, dtype=BF16) for name, shape in SHAPES.items()}


def doing(special: Callable[[torch.Tensor, torch.Tensor], object]) -> Loader:
    """A loader that copies, but does something special (with its parameter's data) to ``n``."""

    def load(model: Model, weights: Weights) -> None:
        for name, weight in weights:
            if name == "n":
                special(model.data(name), weight)
            else:
                model.data(name).copy_(weight)

    return load


def routed(table: RouteTable) -> set[str]:
    return {name for name, routes in table.routes.items() if routes}


@pytest.mark.parametrize("tp", [1, 2])
def test_the_toy_model_is_recorded_whole(tp: int) -> None:
    for rank in range(tp):
        model = toy.toy(rank, tp)
        table = record_routes(model, toy.SHAPES)
        assert routed(table) == set(toy.SHAPES)
        assert not table.fallback
        assert table.constants == [("embed.weight", ((300, 320), (0, 128)), 0.0)]
        rows, start = 256 // tp, rank * 256 // tp
        src = ((start, start + rows), (0, 128))
        assert table.routes["attn.v.weight"] == [
            Route("attn.v.weight", src, "attn.qkv.weight", ((2 * rows, 3 * rows), (0, 128)))
        ]
        assert table.routes["mlp.experts.1.up.weight"] == [
            Route(
                "mlp.experts.1.up.weight",
                src,
                "mlp.w13_weight",
                ((1, 2), (rows, 2 * rows), (0, 128)),
            )
        ]
        assert table.kept_as("attn.o.weight") is BLOCK_FP8
        assert table.kept_as("mlp.router.weight") is UNQUANTIZED


def test_recording_leaves_live_values_and_addresses_alone() -> None:
    model = toy.toy()
    model.data("embed.weight")[toy.VOCAB :].zero_()

    def addresses() -> dict[str, int]:
        return {name: p.data_ptr() for name, p in model.named_parameters()}

    before, at = toy.contents(model), addresses()
    record_routes(model, toy.SHAPES)
    assert toy.same(before, toy.contents(model)) and addresses() == at


def in_a_pool(model: Model, weights: Weights) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda pair: model.data(pair[0]).copy_(pair[1]), weights))


def casts_nothing(model: Model, weights: Weights) -> None:
    for name, weight in weights:
        assert model.data(name).dtype == weight.dtype
        model.data(name).copy_(weight)


@pytest.mark.parametrize("loader", [in_a_pool, casts_nothing])
def test_the_dtype_and_thread_of_a_copy_do_not_matter(loader: Loader) -> None:
    storage = bf16_storage() | fp8_storage("a", 256, 128) | fp8_storage("b", 256, 128)
    assert routed(record_routes(Model(storage, loader), SHAPES)) == set(SHAPES)


def test_sglang_loads_probes_in_the_thread_that_is_watched() -> None:
    from sglang.srt.model_loader.utils import should_async_load

    asked: list[bool] = []

    def load(model: Model, weights: Weights) -> None:
        for name, weight in weights:
            asked.append(should_async_load(weight))
            model.data(name).copy_(weight)

    record_routes(Model(bf16_storage(), load), SHAPES)
    assert asked == [False] * len(SHAPES)
    assert should_async_load(torch.zeros(1)), "control: other tensors go to its pool"


@pytest.mark.parametrize("axis", [0, 1])
def test_sources_that_are_concatenated_are_recorded(axis: int) -> None:
    """DeepSeek keeps one tensor until the other has come."""

    def load(model: Model, weights: Weights) -> None:
        kept = {}
        for name, weight in weights:
            kept[name] = weight.clone()
        model.data("ab").copy_(torch.cat([kept["a"], kept["b"]], axis).contiguous())

    shapes = {"b": (256, 192), "a": (256, 128)} if axis else {"b": (192, 256), "a": (128, 256)}
    sizes = (256, 320) if axis else (320, 256)
    table = record_routes(Model(toy.fp8_storage("ab", *sizes), load), shapes)
    assert not table.fallback
    for name, start in (("a", 0), ("b", 128)):
        whole = [(0, size) for size in shapes[name]]
        dst = list(whole)
        dst[axis] = (start, start + shapes[name][axis])
        assert table.routes[name] == [Route(name, tuple(whole), "ab", tuple(dst))]


IS_RECORDED: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "to dtype": lambda p, w: p.copy_(w.to(torch.float32)),
    "to device": lambda p, w: p.copy_(w.to(p.device)),
    "clone": lambda p, w: p.copy_(w.clone().contiguous()),
    "detach": lambda p, w: p.copy_(w.detach()),
    "read as a slice": lambda p, w: p.copy_(w[:]),
    "pieces": lambda p, w: [p[i].copy_(w[i]) for i in range(4)],
}


@pytest.mark.parametrize("special", IS_RECORDED.values(), ids=IS_RECORDED)
def test_whole_copies_and_boxes_are_recorded(
    special: Callable[[torch.Tensor, torch.Tensor], object],
) -> None:
    table = record_routes(Model(bf16_storage(), doing(special)), SHAPES)
    assert not table.fallback
    assert sum(r.dst[0][1] - r.dst[0][0] for r in table.routes["n"]) == 4


def test_a_scalar_is_recorded() -> None:
    table = record_routes(Model(bf16_storage() | {"n": torch.tensor(9.0)}), {**SHAPES, "n": ()})
    assert table.routes["n"] == [Route("n", (), "n", ())]


def one_alone(model: Model, weights: Weights) -> None:
    toy.copy_all(model, islice(weights, 1))


def of_its_shapes(model: Model, weights: Weights) -> None:
    for name, weight in weights:
        assert model.data(name).shape == weight.shape, f"shape of {name}"
        model.data(name).copy_(weight)


def the_router(model: Model, weights: Weights) -> None:
    toy.copy_all(model, (pair for pair in weights if pair[0] == "router"))


NONE = "no route was recorded for any of 3 tensors"
FUSED = {"router": torch.zeros(4, 128), **fp8_storage("mlp.w13_weight", 4, 256, 128)}
REFUSED: dict[str, tuple[Loader, toy.Tensors, toy.Shapes, str]] = {
    "takes nothing": (lambda model, weights: None, {}, SHAPES, NONE),
    "copies nothing": (lambda model, weights: list(weights) and None, {}, SHAPES, NONE),
    "nothing but fallback": (
        lambda model, weights: [w.sum() for _, w in weights] and None,
        {},
        SHAPES,
        NONE,
    ),
    "stops early": (one_alone, {}, SHAPES, "the stream writes 0 of 32768 elements of b"),
    # the first update of an engine with dummy weights: the trainer's names reach the loader
    "unknown": (of_its_shapes, {}, SHAPES | {"x": (4,)}, r"failed at x \(AttributeError"),
    "rows": (
        of_its_shapes,
        {},
        SHAPES | {"b": (128, 128)},
        r"failed at b \(AssertionError: shape of b",
    ),
    # not the family, which can be updated
    "a checkpoint of fused experts": (
        the_router,
        FUSED,
        {"router": (4, 128), "mlp.experts.gate_up_proj": (4, 256, 128)},
        r"mlp\.experts\.gate_up_proj holds all experts.*original",
    ),
}


@pytest.mark.parametrize(("loader", "storage", "shapes", "fault"), REFUSED.values(), ids=REFUSED)
def test_what_would_not_write_each_parameter_once_is_refused(
    loader: Loader, storage: toy.Tensors, shapes: toy.Shapes, fault: str
) -> None:
    with pytest.raises(RouteError, match=fault):
        record_routes(Model(storage or bf16_storage(), loader), shapes)


def test_write_watch_sees_writes_of_every_form() -> None:
    model = Model(bf16_storage())
    with WriteWatch(model) as watch:
        _ = model.data("a") + 1
    assert watch.written == set()
    with WriteWatch(model) as watch:
        model.data("a")[3:5].copy_(torch.ones(2, 128))
        torch.add(torch.ones(4), 1.0, out=model.data("n"))
    assert watch.written == {"a", "n"}


def tied_model(load: Callable[[Model, dict[str, torch.nn.Parameter], Weights], None]) -> Model:
    """A model whose head is its embedding, and whose loader walks the names of both."""

    def walk(model: Model, weights: Weights) -> None:
        load(model, dict(model.named_parameters(remove_duplicate=False)), weights)

    model = Model({"embed.weight": torch.full((320, 128), 9.0, dtype=BF16)}, walk)
    model.lm_head = model.embed
    return model


def copy_padded(target: torch.Tensor, weight: torch.Tensor) -> None:
    target.data[:300].copy_(weight)
    target.data[300:].fill_(0)


def into_each_name(
    model: Model, parameters: dict[str, torch.nn.Parameter], weights: Weights
) -> None:
    """As SGLang's loaders of Qwen2.5-VL and Qwen3-VL."""
    for name, weight in weights:
        if name == "embed.weight":
            copy_padded(parameters["lm_head.weight"], weight)
        copy_padded(parameters[name], weight)


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("redundant", [False, True])
def test_tied_parameters_are_written_once(redundant: bool, head_first: bool) -> None:
    """By the embedding, also where the checkpoint holds the head besides."""
    names = ["embed.weight", *(["lm_head.weight"] if redundant else [])]
    names = names[::-1] if head_first else names
    table = record_routes(tied_model(into_each_name), dict.fromkeys(names, (300, 128)))
    assert routed(table) == {"embed.weight"}
    assert len(table.routes["embed.weight"]) == 1
    assert table.constants == [("embed.weight", ((300, 320), (0, 128)), 0.0)]


def test_a_head_that_is_all_that_a_tied_model_gets_is_kept() -> None:
    def load(model: Model, parameters: dict[str, torch.nn.Parameter], weights: Weights) -> None:
        for name, weight in weights:
            copy_padded(parameters[name], weight)

    table = record_routes(tied_model(load), {"lm_head.weight": (300, 128)})
    assert routed(table) == {"lm_head.weight"}


def test_two_parameters_of_one_memory_are_one() -> None:
    model = tied_model(into_each_name)
    model.lm_head = torch.nn.Module()
    data = model.get_parameter("embed.weight").data
    model.lm_head.weight = torch.nn.Parameter(data, requires_grad=False)
    table = record_routes(model, {"embed.weight": (300, 128)})
    assert routed(table) == {"embed.weight"}
