"""Boxes of strided views, and what a table of routes refuses before and at each update."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_fp8rl.formats import BLOCK_FP8, BLOCK_FP8_UE8M0, mark
from sgl_fp8rl.formats.weight_format import TensorSpec
from sgl_fp8rl.ops.regions import Region, as_region, numel, sizes, view
from sgl_fp8rl.protocol.manifest import Manifest, ManifestError
from sgl_fp8rl.receiver.routes.routes import Route, RouteError, RouteTable
from tests.sgl_fp8rl.receiver.toy import BF16, FP8, fp8_storage

A_WEIGHT = TensorSpec(BF16, (256, 128))
ALL: Region = ((0, 256), (0, 128))
"""All of it."""
TOP: Region = ((0, 128), (0, 128))
LEFT: Region = ((0, 256), (0, 64))


def region_of(base: torch.Tensor, part: torch.Tensor) -> Region | None:
    return as_region(
        tuple(base.shape), int(part.storage_offset()), tuple(part.shape), part.stride()
    )


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(int(torch.Size(shape).numel())).view(shape)


def box_views(part: torch.Tensor, draw: Any) -> torch.Tensor:
    """A chain of views as loaders make them; each keeps a box of the elements."""
    for _ in range(draw(st.integers(0, 5))):
        step = draw(st.sampled_from(["narrow", "select", "chunk", "unsqueeze", "squeeze", "slice"]))
        dim = draw(st.integers(0, max(part.dim() - 1, 0)))
        if step == "unsqueeze":
            part = part.unsqueeze(dim)
        elif step == "squeeze":
            part = part.squeeze()
        elif part.dim():
            size = part.shape[dim]
            start = draw(st.integers(0, size - 1))
            if step == "select":
                part = part.select(dim, start)
            elif step == "chunk":
                part = draw(st.sampled_from(part.chunk(draw(st.integers(1, size)), dim)))
            else:
                part = part.narrow(dim, start, draw(st.integers(1, size - start)))
    return part


@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_a_box_view_becomes_its_box(shape: list[int], data: Any) -> None:
    base = numbered(*shape)
    part = box_views(base, data.draw)
    region = region_of(base, part)
    assert region is not None
    assert numel(region) == part.numel()
    assert torch.equal(view(base, region).flatten(), part.flatten())
    assert [n for n in sizes(region) if n != 1] == [n for n in part.shape if n != 1]


@given(st.lists(st.integers(1, 4), max_size=3), st.data())
def test_no_strided_view_becomes_a_wrong_box(shape: list[int], data: Any) -> None:
    """Any strides at all: what is called a box holds the view's elements in the view's order."""
    base = numbered(*shape)
    part_shape = data.draw(st.lists(st.integers(1, 4), max_size=3))
    strides = data.draw(st.tuples(*(st.integers(0, base.numel()) for _ in part_shape)))
    last = sum((n - 1) * s for n, s in zip(part_shape, strides, strict=True))
    if last >= base.numel():
        return
    offset = data.draw(st.integers(0, base.numel() - 1 - last))
    part = base.as_strided(part_shape, strides, offset)
    region = region_of(base, part)
    assert region is None or torch.equal(view(base, region).flatten(), part.flatten())


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[::2],
        lambda t: t.flatten()[1:9],
        lambda t: t[:1].expand(4, 6),
        lambda t: t.diagonal(),
        lambda t: t.view(6, 4),
        lambda t: t.unflatten(1, (2, 3)),
    ],
)
def test_a_view_that_is_no_box_is_none(make: Any) -> None:
    base = numbered(4, 6)
    assert region_of(base, make(base)) is None


def test_a_whole_tensor_may_be_flattened() -> None:
    assert region_of(numbered(4, 6), numbered(4, 6).flatten()) == ((0, 4), (0, 6))


def table(
    routes: dict[str, list[Route]], parameters: dict[str, torch.Tensor], **rest: Any
) -> RouteTable:
    """The sources are whole matrices of [256, 128]."""
    return RouteTable(dict.fromkeys(routes, (256, 128)), routes, parameters, **rest)


def route(dst: Region, src: Region | None = None, source: str = "a") -> Route:
    return Route(source, src or ALL, "w", dst)


def bf16(*shape: int) -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(shape, dtype=BF16)}


CODES = torch.zeros(256, 128).to(FP8)
CHECK_REFUSES: list[tuple[list[Route], dict[str, torch.Tensor], str]] = [
    ([], bf16(256, 128), "writes 0 of 32768 elements of w"),
    ([route(ALL)], bf16(300, 128), "writes 32768 of 38400"),
    ([route(ALL)] * 2, bf16(256, 128), "writes 65536 of 32768"),
    # as many elements as there are, but one half twice
    ([route(TOP, TOP)] * 2, bf16(256, 128), "writes 32768 of 32768"),
    # overlap in boxes that differ along the first dimension
    (
        [route(LEFT, LEFT), route(((128, 256), (0, 128)), ((128, 256), (0, 128)))],
        bf16(256, 128),
        "writes 32768 of 32768",
    ),
    (
        [route(((64, 320), (0, 128)))],
        fp8_storage("w", 384, 128),
        r"cuts a block: .* goes to \(\(64, 320\), \(0, 128\)\)",
    ),
    (
        [route(((0, 192), (0, 128)), ((64, 256), (0, 128)))],
        fp8_storage("w", 192, 128),
        r"cuts a block: \(\(64, 256\), \(0, 128\)\) goes to",
    ),
    (
        [route(LEFT, LEFT)],
        fp8_storage("w", 256, 64),
        r"cuts a block: \(\(0, 256\), \(0, 64\)\) goes to",
    ),
    (
        [
            route(((0, 192), (0, 128)), ((0, 192), (0, 128))),
            route(((192, 384), (0, 128)), ((64, 256), (0, 128))),
        ],
        fp8_storage("w", 384, 128),
        "share a block of w",
    ),
    ([route(ALL)], {"w": CODES}, "w_scale_inv is missing"),
    ([route(ALL)], {"w": CODES, "w_scale_inv": torch.zeros(1, 1)}, r"w_scale_inv is \(1, 1\)"),
    (
        [route(ALL), Route("a", ALL, "copy", ALL)],
        {**fp8_storage("w", 256, 128), "copy": torch.zeros(256, 128)},
        "a goes to storage of two formats",
    ),
]


@pytest.mark.parametrize(("routes", "parameters", "fault"), CHECK_REFUSES)
def test_check_refuses(
    routes: list[Route], parameters: dict[str, torch.Tensor], fault: str
) -> None:
    with pytest.raises(RouteError, match=fault):
        table({"a": routes}, parameters).check()


def test_what_no_route_writes_is_left_to_the_loader_if_something_falls_back() -> None:
    parameters = {**fp8_storage("w", 256, 128), "norm": torch.zeros(4)}
    routes = {"a": [route(ALL)], "n": []}
    falls_back = table(routes, parameters, fallback={"n": "why"})
    falls_back.check()
    assert falls_back.by_loader == {"norm"}
    with pytest.raises(RouteError, match="elements of norm"):
        table(routes, parameters).check()


@pytest.mark.parametrize(
    ("routes", "parameters", "fault"),
    [
        ([route(TOP, TOP)], bf16(256, 128), "writes 16384 of 32768 elements of w"),
        ([], fp8_storage("w", 256, 128), r"0 of 32768 elements of w \(not recorded: n\)"),
    ],
)
def test_what_is_written_in_part_and_fp8_storage_is_not_left_to_the_loader(
    routes: list[Route], parameters: dict[str, torch.Tensor], fault: str
) -> None:
    with pytest.raises(RouteError, match=fault):
        table({"a": routes, "n": []}, parameters, fallback={"n": "why"}).check()


def fp8_manifest(shape: tuple[int, int] = (256, 128), name: str = "a") -> Manifest:
    scale = (-(-shape[0] // 128), -(-shape[1] // 128))
    codes = {name: TensorSpec(FP8, shape), f"{name}_scale_inv": TensorSpec(torch.float32, scale)}
    return Manifest(codes)


def test_codes_that_fit_are_routed_with_their_scales() -> None:
    fp8 = table({"a": [route(ALL)]}, fp8_storage("w", 256, 128))
    elsewhere = table({"a": []}, {})  # another rank keeps it
    for manifest, scales in ((Manifest({"a": A_WEIGHT}), 0), (fp8_manifest(), 1)):
        fp8.match(manifest)
        elsewhere.match(manifest)
        found = {name: fp8.routes_for(name, manifest) for name in manifest.tensors}
        assert [r.parameter for r in found.pop("a")] == ["w"]
        assert [r.dst for (r,) in found.values()] == [((0, 2), (0, 1))] * scales
        assert all(elsewhere.routes_for(name, manifest) == [] for name in manifest.tensors)


@pytest.mark.parametrize(
    ("manifest", "fault"),
    [
        (Manifest({"b": A_WEIGHT}), "unknown: b; missing: a"),
        (Manifest({"a": A_WEIGHT, "b": A_WEIGHT}), "unknown: b"),
        (Manifest({}), "missing: a"),
        (Manifest({"a": TensorSpec(BF16, (128, 256))}), r"a has shape \(128, 256\)"),
        (fp8_manifest(), "a is block-fp8, but the engine keeps it in bf16"),
    ],
)
def test_match_refuses(manifest: Manifest, fault: str) -> None:
    with pytest.raises(ManifestError, match=fault):
        table({"a": [route(ALL)]}, bf16(256, 128)).match(manifest)


def test_match_refuses_codes_that_the_trainer_made_for_another_format() -> None:
    """As for an engine that has restarted: both formats have codes of one dtype."""
    plain, rounded = (table({"a": [route(ALL)]}, fp8_storage("w", 256, 128)) for _ in range(2))
    mark(rounded.parameters["w"], BLOCK_FP8_UE8M0)
    for kept, engine in ((BLOCK_FP8, plain), (BLOCK_FP8_UE8M0, rounded)):
        for made in (BLOCK_FP8, BLOCK_FP8_UE8M0):
            manifest = replace(fp8_manifest(), codes=made.name)
            bf16_only = replace(Manifest({"a": A_WEIGHT}), codes=made.name)
            engine.match(bf16_only)
            if made is kept:
                engine.match(manifest)
                continue
            with pytest.raises(ManifestError, match=f"a is {made.name}, .* in {kept.name}; send"):
                engine.match(manifest)
        engine.match(fp8_manifest())  # no one says; values tell


def test_match_refuses_codes_for_sglangs_loader() -> None:
    """It would cast them to BF16 without their scales."""
    falls_back = table({"a": []}, bf16(256, 128), fallback={"a": "why"})
    falls_back.match(Manifest({"a": A_WEIGHT}))
    with pytest.raises(ManifestError, match="a is block-fp8, but the engine keeps it in bf16"):
        falls_back.match(fp8_manifest())


def test_an_update_may_omit_what_no_rank_keeps() -> None:
    tied = table({"a": [route(ALL)], "head": []}, bf16(256, 128))
    with pytest.raises(ManifestError, match="missing: head"):
        tied.match(Manifest({"a": A_WEIGHT}))
    tied.skipped = frozenset({"head"})
    tied.match(Manifest({"a": A_WEIGHT}))
    tied.match(Manifest({"a": A_WEIGHT, "head": A_WEIGHT}))
