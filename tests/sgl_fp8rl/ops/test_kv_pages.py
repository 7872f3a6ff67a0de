"""The reference of copies out of a paged 8-bit cache, against float64 and page by page."""

import pytest
import torch

from sgl_fp8rl.ops.kv_pages import dequantize_pages
from tests.kv_pages_oracle import FORMATS, SHAPES, Case, assert_same, draw, want

FP16, BF16 = torch.float16, torch.bfloat16


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pages_lie_side_by_side(shape: tuple[int, ...], kind: str) -> None:
    made = draw(shape, kind)
    assert_same(made.on("cpu").run(dequantize_pages), want(made))


def test_int8_is_exact_in_fp16_and_rounded_once_in_bf16() -> None:
    made = draw(SHAPES[0], "int8")
    exact = want(made, torch.float64)
    assert_same(tuple(x.double() for x in made.on("cpu").run(dequantize_pages)), exact)
    made.dtype = BF16
    assert_same(made.on("cpu").run(dequantize_pages), tuple(x.to(BF16) for x in exact))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"pages": torch.zeros(3, dtype=torch.int64)}, "pages.*int64.*int32"),
        ({"k": torch.zeros(9, 2, 64, dtype=FP16)}, r"workspace of K.*\[24, 2, 64\]"),
        ({"v": torch.zeros(24, 2, 32, dtype=FP16)}, r"workspace of V.*\[24, 2, 64\]"),
        ({"k": torch.zeros(24, 2, 64)}, "workspace of K.*float32.*float16"),
        ({"v": torch.zeros(48, 2, 64, dtype=FP16)[::2]}, "workspace of V.*contiguous"),
    ],
)
def test_what_does_not_fit_is_a_sentence(change: dict[str, torch.Tensor], sentence: str) -> None:
    made: Case = draw((3, 8, 2, 64, 64), "int8")
    given = {
        "pages": made.pages_P,
        "k": torch.zeros(24, 2, 64, dtype=FP16),
        "v": torch.zeros(24, 2, 64, dtype=FP16),
    } | change
    with pytest.raises(ValueError, match=sentence):
        dequantize_pages(made.codes, given["pages"], 8, given["k"], given["v"])
