"""The kernel that copies pages of an 8-bit cache, against its reference and float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_fp8rl.ops import kv_pages, kv_pages_triton
from tests.gpu.conftest import INTERPRETED
from tests.kv_pages_oracle import FORMATS, SHAPES, Case, assert_same, draw, want


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pages_lie_side_by_side(device: str, shape: tuple[int, ...], kind: str) -> None:
    made = draw(shape, kind)
    assert_same(made.on(device).run(kv_pages_triton.dequantize_pages), want(made))


@given(
    st.builds(
        draw,
        st.tuples(
            st.integers(0, 5),
            st.sampled_from([2, 16, 64]),
            st.integers(1, 3),
            st.sampled_from([16, 64, 80, 96, 128]),
            st.sampled_from([64, 128]),
        ),
        st.sampled_from(FORMATS),
        st.integers(0, 2**32 - 1),
    ),
    st.sampled_from([torch.float16, torch.bfloat16]),
)
@settings(max_examples=8 if INTERPRETED else 60)
def test_any_copy(device: str, made: Case, dtype: torch.dtype) -> None:
    made.dtype = dtype
    reference = made.on("cpu").run(kv_pages.dequantize_pages)
    assert_same(made.on(device).run(kv_pages_triton.dequantize_pages), reference)


def test_control_a_wrong_page_is_seen(device: str) -> None:
    made = draw(SHAPES[1], "int8")
    wanted = want(made)
    made.pages_P = made.pages_P.flip(0)
    with pytest.raises(AssertionError, match="differ"):
        assert_same(made.on(device).run(kv_pages_triton.dequantize_pages), wanted)


# ---- only on a GPU


@pytest.mark.skipif(INTERPRETED, reason="4 GiB")
def test_a_workspace_beyond_32_bits(device: str) -> None:
    made = draw((3, 256, 8, 128, 128), "int8").on(device)
    made.pages_P = made.pages_P.repeat(2734)
    k_WHD, _ = made.run(kv_pages_triton.dequantize_pages)
    assert k_WHD.numel() > 2**31
    last = slice(-256 - 3, -3)
    slots = int(made.pages_P[-1]) * 256 + torch.arange(256, device=device)
    assert torch.equal(k_WHD[last].float(), made.codes.values(slots)[0])
