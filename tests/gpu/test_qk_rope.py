"""The one launch of a decode step against its reference, the oracle, and SGLang's own kernels."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_fp8rl.ops import kv_triton, qk_rope
from sgl_fp8rl.ops.qk_rope_triton import norm_rope_store
from tests.gpu.conftest import INTERPRETED
from tests.qk_rope_oracle import Case, Got, assert_equal, assert_near, exact, usual

SHAPES = [(1, 2, 1, 32), (5, 4, 2, 64), (3, 8, 8, 32), (4, 18, 9, 128), (2, 10, 2, 256)]
"""Tokens, query heads, KV heads, head dim; programs of whole and of unfilled rows."""


def launched(made: Case, device: str) -> Got:
    return made.on(device).run(norm_rope_store)


@pytest.mark.parametrize("int8", [False, True], ids=["e4m3", "int8"])
@pytest.mark.parametrize("rotary", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normed", [True, False], ids=["normed", ""])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_where_fp32_is_exact_every_bit_is_the_oracles(
    device: str, shape: tuple[int, int, int, int], normed: bool, rotary: torch.dtype, int8: bool
) -> None:
    made = exact(shape, normed=normed, rotary=rotary, gap=16, seed=sum(shape))
    made.int8 = int8
    assert_equal(launched(made, device).left(), made.want())


@pytest.mark.parametrize("gap", [0, 1, 8])
def test_tokens_and_heads_may_lie_apart(device: str, gap: int) -> None:
    made = exact((4, 4, 2, 64), normed=True, gap=gap)
    assert_equal(launched(made, device).left(), made.want())


@pytest.mark.parametrize(
    ("shape", "normed", "int8"),
    [
        *(
            (shape, n, False)
            for shape in ((33, 32, 8, 128), (40, 14, 2, 64))
            for n in (True, False)
        ),
        ((9, 32, 8, 128), False, True),
    ],
    ids=str,
)
def test_elsewhere_all_but_rare_neighbours_are_the_twins(
    device: str, shape: tuple[int, int, int, int], normed: bool, int8: bool
) -> None:
    """And of INT8 without norms every bit."""
    made = replace(usual(shape, normed=normed), int8=int8)
    reference = made.on("cpu").run(qk_rope.norm_rope_store).left()
    (assert_equal if int8 else assert_near)(launched(made, device).left(), reference)


@given(
    st.integers(1, 12),
    st.integers(1, 10),
    st.integers(1, 5),
    st.sampled_from([32, 64, 128]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=8 if INTERPRETED else 60)
def test_any_step(
    device: str, T: int, H: int, group: int, D: int, normed: bool, int8: bool, seed: int
) -> None:
    made = replace(exact((T, H * group, H, D), normed=normed, seed=seed), int8=int8)
    reference = made.on("cpu").run(qk_rope.norm_rope_store).left()
    assert_equal(launched(made, device).left(), reference)


@pytest.mark.parametrize("count", [0, 9])
def test_padding_tokens_alone_and_no_tokens_count_nothing(device: str, count: int) -> None:
    made = exact((count, 4, 2, 32), normed=True)
    made.slots_T.zero_()
    got = launched(made, device)
    assert got.q.shape == (count, 128) and got.cache.stats_C.tolist() == [5, 1, 2, 0, 0]


@pytest.mark.parametrize("int8", [False, True], ids=["e4m3", "int8"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan], ids=str)
@pytest.mark.parametrize("head", [0, 4, 7], ids=["q", "k", "v"])
def test_what_is_no_number(device: str, value: float, head: int, int8: bool) -> None:
    made = replace(exact((3, 4, 2, 32), normed=not int8), int8=int8)
    made.qkv_THD[0, head, 7] = value
    reference = made.on("cpu").run(qk_rope.norm_rope_store)
    got = launched(made, device)
    for mine, other in zip(got.left()[1:], reference.left()[1:], strict=True):
        np.testing.assert_array_equal(mine, other)
    assert torch.equal(got.q.isnan().cpu(), reference.q.isnan())


def test_statistics_add_up_and_the_largest_stays(device: str) -> None:
    made = exact((6, 4, 2, 64), normed=False)
    reference, got = made.on("cpu"), made.on(device)
    got.cache.stats_C[3] = reference.cache.stats_C[3] = 0x7F000000
    for _ in range(2):
        got.run(norm_rope_store)
        reference.run(qk_rope.norm_rope_store)
    assert got.left()[3] == reference.left()[3]
    assert got.left()[3][0] == 5 + 2 * 5 and got.left()[3][3] == 0x7F000000


def test_what_does_not_fit_is_a_sentence(device: str) -> None:
    got = exact((3, 4, 2, 32), normed=True).on(device)
    got.slots = got.slots.int()
    with pytest.raises(ValueError, match=r"slots came as torch\.int32"):
        got.run(norm_rope_store)


# ---- only on a GPU


def sglangs(got: Got) -> Got:
    """SGLang's kernels one after the other, and our store."""
    from sglang.kernels.ops.attention.rope import apply_rope_with_cos_sin_cache_inplace
    from sglang.kernels.ops.layernorm.norm import fused_inplace_qknorm

    _, H, D = got.k_cache.shape
    heads = got.qkv.clone().unflatten(1, (-1, D))
    q, k, v = heads.split([heads.shape[1] - 2 * H, H, H], 1)
    if got.norms is not None:
        fused_inplace_qknorm(q, k, got.norms.q_D, got.norms.k_D, got.norms.eps, head_dim=D)
    apply_rope_with_cos_sin_cache_inplace(
        positions=got.positions, q=q, k=k, cos_sin_cache=got.cos_sin, is_neox=True
    )
    kv_triton.store_kv(k, v, got.slots, got.cache, read_back=False)
    got.q = q.flatten(1)
    return got


@pytest.mark.skipif(INTERPRETED, reason="SGLang's kernels are CUDA")
@pytest.mark.parametrize("normed", [True, False], ids=["normed", ""])
@pytest.mark.parametrize("shape", [(1, 32, 8, 128), (128, 32, 8, 128), (64, 14, 2, 64)], ids=str)
def test_it_is_what_sglangs_kernels_make(
    device: str, shape: tuple[int, int, int, int], normed: bool
) -> None:
    """Without norms to the last bit."""
    pytest.importorskip("sglang.kernels.ops.layernorm.norm")
    made = usual(shape, normed=normed)
    compare = assert_near if normed else assert_equal
    compare(launched(made, device).left(), sglangs(made.on(device)).left())
