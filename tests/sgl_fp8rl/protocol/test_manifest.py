"""The manifest: what it refuses before anything is written, and that it survives the wire."""

from typing import Any

import pytest
import torch

from sgl_fp8rl.formats import DTYPES
from sgl_fp8rl.formats.weight_format import TensorSpec
from sgl_fp8rl.protocol.manifest import (
    MOST_SLOTS,
    PROTOCOL,
    Manifest,
    ManifestError,
    describe,
)

FP8 = torch.float8_e4m3fn
GOOD: dict[str, Any] = {
    "protocol": PROTOCOL,
    "tensors": {"a.weight": ["bfloat16", [4, 8]], "a.bias": ["float32", [4]]},
    "chunk_bytes": 512,
    "mapped": ["a.bias"],
    "streamed": False,
    "slots": 2,
    "codes": None,
}


def test_a_good_manifest_is_read() -> None:
    manifest = Manifest.from_json(GOOD)
    assert manifest.tensors["a.weight"] == TensorSpec(torch.bfloat16, (4, 8))
    assert manifest.nbytes == 4 * 8 * 2 + 4 * 4
    assert (manifest.chunk_bytes, manifest.mapped) == (512, {"a.bias"})
    for many in (1, 2, MOST_SLOTS):
        manifest = Manifest.from_json({**GOOD, "slots": many})
        assert (manifest.slots, manifest.bucket_bytes) == (many, many * 512)


def test_a_manifest_says_which_codes_the_trainer_makes() -> None:
    named = [Manifest.from_json({**GOOD, "codes": name}) for name in ("block-fp8", None)]
    assert [manifest.codes for manifest in named] == ["block-fp8", None]
    assert len({manifest.fingerprint for manifest in named}) == 2


MAPPED = [None, "a.bias", {"a.bias": 1}, ["b"], [None], [["a.bias"]], [{}], ["a.bias", 1]]
SIZES = [None, "512", True, 512.0, 0, -512, 128, 513, 2**40]
SLOTS = [None, "2", True, 1.0, 0, -1, MOST_SLOTS + 1, [2]]
REFUSED: dict[str, tuple[str, list[Any]]] = {
    "protocol": (r"protocol .* sgl-fp8rl", [PROTOCOL + 1, None, str(PROTOCOL)]),
    "codes": (r"codes are of .* block-fp8-ue8m0, or null", ["bf16", "int8", 8, ["block-fp8"]]),
    "tensors": ("names no tensors", [None, {}, [], "a"]),
    "mapped": ("mapped names a tensor", MAPPED),
    "chunk_bytes": ("chunk_bytes is", SIZES),  # whole lines of memory
    "slots": (rf"slots is .*; give a number from 1 to {MOST_SLOTS}", SLOTS),
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_of_another_value_is_refused(field: str) -> None:
    fault, values = REFUSED[field]
    for value in values:
        with pytest.raises(ManifestError, match=fault):
            Manifest.from_json({**GOOD, field: value})


@pytest.mark.parametrize("data", [None, [], "manifest", 1])
def test_what_is_no_object_is_refused(data: Any) -> None:
    with pytest.raises(ManifestError, match=type(data).__name__):
        Manifest.from_json(data)


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {},
        "bfloat16",
        ["bfloat16"],
        *(["bfloat16", shape] for shape in (4, [0], [-1, 4], [True], [4.0], ["4"], [None])),
        *(["bfloat16", shape] for shape in ([2**40], [2**30, 2**30], [1] * 9)),
        *([dtype, [4]] for dtype in ("float64", "torch.bfloat16", ["bfloat16"], None, {})),
        ["bfloat16" * 1000, [4]],
        ["bfloat16", [4], "x" * 1000],
    ],
)
def test_a_malformed_tensor_is_refused_by_name(entry: Any) -> None:
    with pytest.raises(ManifestError, match=r"^a\.weight (is described|has (dtype|shape))") as no:
        Manifest.from_json({**GOOD, "tensors": {"a.weight": entry}, "mapped": []})
    assert len(str(no.value)) < 300


@pytest.mark.parametrize("name", ["w" * 1000, "a\nb", "\ud800"])
def test_a_name_that_no_checkpoint_has_is_refused(name: str) -> None:
    """It would stand in errors and logs."""
    with pytest.raises(ManifestError, match="a tensor is called") as no:
        Manifest.from_json({**GOOD, "tensors": {name: ["bfloat16", [4]]}, "mapped": []})
    assert str(no.value).isprintable()
    assert len(str(no.value)) < 200


@pytest.mark.parametrize("field", ["protocol", "chunk_bytes"])
def test_errors_quote_little_of_what_is_nested(field: str) -> None:
    nested: Any = []
    for _ in range(5000):  # more than repr() can follow
        nested = [nested]
    with pytest.raises(ManifestError) as no:
        Manifest.from_json({**GOOD, field: nested})
    assert len(str(no.value)) < 200


SCALE = TensorSpec(torch.float32, (2, 3))
CODES = TensorSpec(FP8, (200, 300))


def test_codes_come_with_their_scales() -> None:
    manifest = Manifest({"w": CODES, "w_scale_inv": SCALE, "n": TensorSpec(torch.float16, (4,))})
    assert [name for name in manifest.tensors if manifest.is_companion(name)] == ["w_scale_inv"]
    assert [name for name, _ in manifest.weights()] == ["w", "n"]
    scale = TensorSpec(torch.float32, (4, 2, 3))  # experts have scales each
    Manifest({"w": TensorSpec(FP8, (4, 200, 300)), "w_scale_inv": scale})
    # a name that only sounds like scales
    assert not Manifest({"w_scale_inv": SCALE}).is_companion("w_scale_inv")


@pytest.mark.parametrize(
    ("codes", "scale", "fault"),
    [
        (CODES, None, "without w_scale_inv"),
        (CODES, TensorSpec(torch.bfloat16, (2, 3)), "is bfloat16"),
        (CODES, TensorSpec(FP8, (2, 3)), "scale_inv"),
        (CODES, TensorSpec(torch.float32, (3, 2)), r"send float32 of shape \(2, 3\)"),
        (CODES, TensorSpec(torch.float32, (2,)), r"send float32 of shape \(2, 3\)"),
        (TensorSpec(FP8, (128,)), TensorSpec(torch.float32, (1,)), "only matrices can be FP8"),
        (TensorSpec(torch.bfloat16, (200, 300)), SCALE, "comes with w in bfloat16"),
        (TensorSpec(torch.float32, (200, 300)), SCALE, "comes with w in float32"),
    ],
)
def test_codes_and_scales_that_do_not_belong_together(
    codes: TensorSpec, scale: TensorSpec | None, fault: str
) -> None:
    tensors = {"w": codes} | ({"w_scale_inv": scale} if scale else {})
    with pytest.raises(ManifestError, match=fault):
        Manifest(tensors)


def test_describe_reads_names_dtypes_and_shapes() -> None:
    pairs = [("w", torch.zeros(2, 3, dtype=torch.float16)), ("s", torch.tensor(1.0))]
    specs = {"w": TensorSpec(torch.float16, (2, 3)), "s": TensorSpec(torch.float32, ())}
    assert describe(pairs) == Manifest(specs)
    described = describe(pairs, 1024, ["s"], slots=1)
    assert described == Manifest(specs, chunk_bytes=1024, mapped=frozenset({"s"}), slots=1)


@pytest.mark.parametrize(
    ("tensors", "fault"),
    [
        *(([torch.ones(shape)], "w has shape") for shape in ((0,), (4, 0), (0, 128, 128))),
        ([torch.zeros(2), torch.zeros(2)], "w comes twice"),
        *(
            ([torch.zeros(2).to(dtype)], f"w has dtype {dtype}; send one of {', '.join(DTYPES)}")
            for dtype in (torch.float64, torch.int8, torch.bool, torch.float8_e5m2)
        ),
    ],
)
def test_describe_refuses(tensors: list[torch.Tensor], fault: str) -> None:
    with pytest.raises(ManifestError, match=fault):
        describe(("w", tensor) for tensor in tensors)
