"""What every weight format must pass. ``tests/gpu/test_formats.py`` adds its kernel.

One of the formats is of tests alone (``other_format.py``).
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sgl_fp8rl.formats import (
    BLOCK_FP8,
    BLOCK_FP8_UE8M0,
    BLOCKS,
    FORMATS,
    UNQUANTIZED,
    mark,
    split_name,
    stored_format,
)
from sgl_fp8rl.formats.weight_format import WEIGHT_DTYPES, Encoded, TensorSpec, WeightFormat
from sgl_fp8rl.ops.reference import FP8_MAX, LARGEST_SCALE
from sgl_fp8rl.ops.regions import Region, view, whole
from sgl_fp8rl.protocol.checkpoint_headers import read_headers
from sgl_fp8rl.protocol.chunks import cut_into_chunks
from sgl_fp8rl.protocol.manifest import Manifest, ManifestError, describe
from sgl_fp8rl.receiver.routes import route_tracer
from sgl_fp8rl.receiver.routes.route_tracer import record_routes
from sgl_fp8rl.receiver.routes.routes import Route, RouteError, RouteTable
from sgl_fp8rl.receiver.writers.weight_writer import write_tensor
from tests.sgl_fp8rl.formats.other_format import OTHER, every_format
from tests.sgl_fp8rl.receiver.toy import Model

pytestmark = pytest.mark.usefixtures("other_format")

BF16 = torch.bfloat16
SHAPES = [(256, 384), (300, 200), (3, 130, 64), (1, 1)]
NEAR = 1 / 13
"""Largest error of a weight as a share of its largest value. Measured: block FP8 0.029, with scales
that are powers of two 0.055, BF16 0."""


def weight(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def assert_same(found: Encoded, expected: Encoded) -> None:
    assert found.keys() == expected.keys()
    for suffix, tensor in expected.items():
        assert found[suffix].dtype == tensor.dtype
        assert torch.equal(bits(found[suffix]), bits(tensor))


def cut(fmt: WeightFormat, encoded: Encoded, region: Region) -> Encoded:
    """The same box of codes and companions."""
    boxes = {s: fmt.companion_region(s, region) if s else region for s in encoded}
    return {suffix: view(tensor, boxes[suffix]) for suffix, tensor in encoded.items()}


@every_format
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_encode_gives_what_is_announced(
    fmt: WeightFormat, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    original = weight(*shape, dtype=dtype)
    encoded = fmt.encode(original)
    codes = encoded[""]
    assert codes.shape == shape and codes.dtype in fmt.dtypes
    mark(codes, fmt)
    assert stored_format(codes) is fmt
    companions = {s: TensorSpec(t.dtype, tuple(t.shape)) for s, t in encoded.items() if s}
    assert companions == fmt.companions(shape) and set(companions) == set(fmt.suffixes)
    assert all(split_name(f"w{suffix}") == ("w", suffix) for suffix in companions)
    for suffix, tensor in encoded.items():
        fmt.check_values(suffix, tensor)
    error = (fmt.decode(encoded) - original.float()).abs().max() / original.abs().max()
    assert error < NEAR
    for suffix in companions:  # the control: a companion that is an eighth too large
        wrong = fmt.decode({**encoded, suffix: encoded[suffix] * 1.125})
        assert (wrong - original.float()).abs().max() / original.abs().max() > NEAR


@every_format
def test_whatever_is_not_finite_is_refused(fmt: WeightFormat) -> None:
    for value in (float("nan"), float("inf"), -float("inf")):
        spoiled = weight(128, 128)
        spoiled[7, 70] = value
        with pytest.raises(ValueError, match="NaN or Inf"):
            fmt.encode(spoiled)
    for suffix, tensor in fmt.encode(weight(128, 128)).items():
        if tensor.is_floating_point():
            tensor.view(-1)[-1] = float("nan")
            with pytest.raises(ValueError, match=r"NaN or Inf|a positive number"):
                fmt.check_values(suffix, tensor)
    # and a size of a layer is accepted, or refused with a reason
    assert fmt.refusal([256, 128], 512) is None
    refused = fmt.refusal([1000, 128], 77)
    assert refused is None if fmt is UNQUANTIZED else "1000+128 x 77" in str(refused)


@every_format
def test_what_needs_a_scale_that_products_of_two_overflow_with_is_refused(
    fmt: WeightFormat,
) -> None:
    """And no more: the largest weight that is accepted has the largest scale."""
    if not fmt.suffixes or fmt is OTHER:
        return
    spec = torch.full((128, 128), FP8_MAX)
    (largest,) = {float(each) for each in fmt.encode(spec)[fmt.suffixes[0]].view(-1)}
    top = spec * (LARGEST_SCALE / largest)
    assert float(fmt.encode(top)[fmt.suffixes[0]].max()) <= LARGEST_SCALE
    top[3, 5] *= 1.01
    with pytest.raises(ValueError, match="too large"):
        fmt.encode(top)
    if fmt in BLOCKS:
        fmt.check_values(fmt.suffixes[0], torch.tensor([LARGEST_SCALE]))
        with pytest.raises(ValueError, match="up to"):
            fmt.check_values(fmt.suffixes[0], torch.tensor([1.0, LARGEST_SCALE * 1.01]))


@every_format
@pytest.mark.parametrize("shape", [(256, 384), (300, 200), (2, 256, 256)])
def test_rows_may_be_encoded_apart(fmt: WeightFormat, shape: tuple[int, ...]) -> None:
    """So a matrix may be cut where a chunk ends, and a stack at any of its matrices."""
    original = weight(*shape)
    encoded, step = fmt.encode(original), fmt.block[0] if len(shape) == 2 else 1
    for border in range(step, shape[0], step):
        for rows in ((0, border), (border, shape[0])):
            region = (rows, *whole(shape[1:]))
            fmt.check_cut("w", region, shape)
            assert_same(fmt.encode(view(original, region)), cut(fmt, encoded, region))


@every_format
def test_a_cut_inside_of_a_block_is_refused(fmt: WeightFormat) -> None:
    of_rows = (((1, 256), (0, 256)), ((0, 255), (0, 256)))
    of_columns = ((0, 256), (0, 255))
    original = weight(256, 256)
    for region in (*of_rows, of_columns):
        if fmt.block == (1, 1) or (fmt.block[0] == 1 and region in of_rows):
            fmt.check_cut("w", region, (256, 256))
            expected = cut(fmt, fmt.encode(original), region)
            assert_same(fmt.encode(view(original, region)), expected)
        else:
            with pytest.raises(ValueError, match="cuts a"):
                fmt.check_cut("w", region, (256, 256))


def stored(fmt: WeightFormat, shape: tuple[int, ...]) -> RouteTable:
    """An engine of BF16 that keeps ``w`` in the format, and nothing written yet."""
    specs = {"w": TensorSpec(fmt.dtypes[0], shape)}
    specs |= {f"w{suffix}": spec for suffix, spec in fmt.companions(shape).items()}
    parameters = {name: torch.ones(spec.shape).to(spec.dtype) for name, spec in specs.items()}
    mark(parameters["w"], fmt)
    table = RouteTable(
        {"w": shape}, {"w": [Route("w", whole(shape), "w", whole(shape))]}, parameters
    )
    table.check()
    return table


def sent(table: RouteTable, tensors: dict[str, torch.Tensor], chunk_bytes: int) -> Manifest:
    """Send tensors in chunks and write each; returns what was announced."""
    manifest = Manifest.from_json(describe(tensors.items(), chunk_bytes).to_json())
    table.match(manifest)
    for chunk in cut_into_chunks(manifest):
        for piece in chunk:
            routes = table.routes_for(piece.name, manifest)
            rows = tensors[piece.name][slice(*piece.rows)]
            write_tensor(table, routes, rows, piece.rows, BF16)
    return manifest


@every_format
@pytest.mark.parametrize("shape", [(384, 256), (300, 200), (3, 256, 128)])
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_a_weight_arrives_encoded_or_not(
    fmt: WeightFormat, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """What a trainer encodes and what the engine encodes are the same bytes, also over chunks."""
    original, table = weight(*shape, dtype=dtype), stored(fmt, shape)
    expected = fmt.encode(original.to(BF16))
    encoded = {f"w{s}": t for s, t in expected.items()}
    for tensors in ({"w": original}, encoded):
        for parameter in table.parameters.values():
            parameter.zero_()
        sent(table, tensors, 1 << 17)
        found = {name.removeprefix("w"): t for name, t in table.parameters.items()}
        assert_same(found, expected)


@every_format
def test_a_companion_comes_with_its_codes_and_in_its_shape(fmt: WeightFormat) -> None:
    """And storage has it too."""
    encoded = {f"w{suffix}": t for suffix, t in fmt.encode(weight(256, 256)).items()}
    table = stored(fmt, (256, 256))
    for companion in (f"w{suffix}" for suffix in fmt.suffixes):
        alone = {name: t for name, t in encoded.items() if name != companion}
        for wrong in (alone, {**encoded, companion: encoded[companion][:1]}):
            with pytest.raises(ManifestError, match=companion):
                describe(wrong.items())
        parameters: Any = {n: t for n, t in table.parameters.items() if n != companion}
        with pytest.raises(RouteError, match=f"{companion} is missing"):
            RouteTable(table.sources, table.routes, parameters).check()
    manifest = describe(encoded.items())
    assert [name for name, _ in manifest.weights()] == ["w"]
    assert [n for n in encoded if manifest.is_companion(n)] == [f"w{s}" for s in fmt.suffixes]


def test_codes_of_a_variant_come_with_its_scales() -> None:
    """A checkpoint with powers of two is one of block FP8, and not the other way about."""
    encoded = {f"w{s}": t for s, t in BLOCK_FP8.encode(weight(256, 256)).items()}
    with pytest.raises(ValueError, match="w_scale_inv holds a scale that is not a power of two"):
        sent(stored(BLOCK_FP8_UE8M0, (256, 256)), encoded, 1 << 17)
    rounded = {f"w{s}": t for s, t in BLOCK_FP8_UE8M0.encode(weight(256, 256)).items()}
    for fmt in BLOCKS:
        sent(table := stored(fmt, (256, 256)), rounded, 1 << 17)
        assert_same(table.parameters, rounded)
        assert table.by_format() == {fmt.name: ["w"]}


@every_format
def test_a_dtype_is_that_of_one_format(fmt: WeightFormat) -> None:
    others = [f for f in FORMATS.values() if f is not fmt and not f.power_of_two_scales]
    if not fmt.power_of_two_scales:
        assert not set(fmt.dtypes) & {dtype for other in others for dtype in other.dtypes}


@every_format
def test_headers_tell_dtype_and_shape(fmt: WeightFormat, tmp_path: Path) -> None:
    encoded = {f"w{suffix}": t for suffix, t in fmt.encode(weight(64, 64)).items()}
    save_file(encoded, tmp_path / "model.safetensors")
    specs = {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in encoded.items()}
    assert read_headers([tmp_path / "model.safetensors"]) == specs
    assert [*describe(encoded.items()).tensors] == [*specs]


def test_routes_into_the_other_format_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a loader that casts nothing: what it is offered has the dtype of the codes."""

    def load(model: Model, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, offered in weights:
            if offered.dtype != model.data(name).dtype:
                raise ValueError(f"{name} is {offered.dtype}")
            model.data(name).copy_(offered)

    table = stored(OTHER, (64, 128))
    model = Model(table.parameters, load)
    with pytest.raises(RouteError, match=r"w is torch\.float8"):  # the control
        record_routes(model, {"w": (64, 128)})
    monkeypatch.setattr(route_tracer, "QUANTIZED", OTHER)
    recorded = record_routes(model, {"w": (64, 128)})
    assert recorded.routes == table.routes and recorded.by_format() == {OTHER.name: ["w"]}
