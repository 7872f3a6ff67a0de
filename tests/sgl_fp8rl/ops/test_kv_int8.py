"""The reference of the INT8 store against the NumPy oracle, byte for byte, and what it is for.

``tests/gpu/test_kv_int8_triton.py`` holds kernel and reference against it in more shapes.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from scipy.linalg import hadamard

from sgl_fp8rl.ops import kv, kv_int8
from sgl_fp8rl.ops.kv import Cache, store_kv
from sgl_fp8rl.ops.kv_int8 import rotate, rotate_queries, token_codes
from sgl_fp8rl.ops.paged_decode import Pages, attend
from tests.kv_int8_oracle import BLOCKS, encode, left, matrix, rotated, want
from tests.kv_oracle import Case, any_bits, case

Tensor = torch.Tensor
BF16, FP16 = torch.bfloat16, torch.float16
NAN, INF = math.nan, math.inf
DIMS = [64, 96, 128, 192, 256]
ROUNDED = 2e-6
"""Of a rotation in FP32, relative to a head's norm. Healthy: 2e-7."""


def usual(dim: int, *, tokens: int = 64, heads: int = 4, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, heads, dim, generator=random).to(BF16)


# ---- the rotation


@pytest.mark.parametrize("dim", DIMS)
def test_the_rotation_is_that_of_float64(dim: int) -> None:
    x = usual(dim)
    block = BLOCKS[dim]
    ones = np.kron(np.eye(dim // block), hadamard(block)) / math.sqrt(block)
    np.testing.assert_array_equal(ones, matrix(dim))
    exact = x.double() @ torch.from_numpy(ones)
    norm = x.double().norm(dim=-1, keepdim=True)
    assert float(((rotate(x) - exact) / norm).abs().max()) < ROUNDED
    assert float(((rotate(rotate(x)) - x) / norm).abs().max()) < ROUNDED, "its own inverse"
    np.testing.assert_array_equal(rotate(x)[0, 0].numpy(), rotated(x[0, 0].float().numpy()))
    # control: two neighbours exchanged
    other = x.view(-1, 2).flip(1).view_as(x)
    assert float(((rotate(other) - exact) / norm).abs().max()) > 100 * ROUNDED


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_scores_stay_what_they_were(dim: int, dtype: torch.dtype) -> None:
    q, k = usual(dim).to(dtype), usual(dim, seed=1).to(dtype)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double())
    turned = torch.einsum("qhd,khd->hqk", rotate(q).double(), rotate(k).double())
    norm = dim**0.5 * 2
    assert float((turned - scores).abs().max()) < ROUNDED * norm**2
    half = rotate_queries(q)
    assert half.dtype == FP16 and half.is_contiguous()
    once = torch.einsum("qhd,khd->hqk", half.double(), rotate(k).double())
    assert float((once - scores).abs().max()) < 2.0**-11 * norm**2
    unturned = torch.einsum("qhd,khd->hqk", q.double(), rotate(k).double())
    assert float((unturned - scores).abs().max()) > 0.1 * norm  # control


def test_queries_saturate_and_nan_stays() -> None:
    q = torch.zeros(4, 1, 64, dtype=BF16)
    q[0], q[1, 0, 3], q[2, 0, 3], q[3] = 3e4, INF, NAN, -3e4
    turned = rotate_queries(q)[:, 0]
    assert turned[0, 0] == 65504 and turned[3, 0] == -65504 and not turned[0, 1:].any()
    assert bool((turned[1].abs() == 65504).all()) and bool(turned[2].isnan().all())


# ---- codes


BY_HAND = [
    *((0.0, 2.0**-20), (1e-30, 2.0**-20), (127 * 2.0**-20, 2.0**-20), (127.0, 1.0)),
    *((127.5, 1.125), (120.0, 1.0), (119.0, 0.9375)),
    *((65024.0, 512.0), (1e30, 512.0), (INF, 512.0)),
]


@pytest.mark.parametrize(("largest", "scale"), BY_HAND)
def test_scales_that_were_worked_out_by_hand(largest: float, scale: float) -> None:
    x = torch.zeros(1, 1, 64, dtype=torch.float32)
    x[0, 0, 5] = -largest
    codes, found = token_codes(x, rotated=False)
    assert float(found) == scale
    assert int(codes[0, 0, 5]) == -round(min(largest / scale, 127.0))
    assert int(codes.count_nonzero()) <= 1


def test_codes_are_rounded_to_nearest_even() -> None:
    values = [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49, 125.5, 126.5, -126.5, 1e-40]
    codes, scale = token_codes(torch.tensor(values + [0.0] * 4).view(1, 1, 16), rotated=False)
    assert float(scale) == 1
    assert codes.flatten().tolist()[:12] == [127, 0, 2, 2, 0, -2, -2, 0, 126, 126, -126, 0]


@pytest.mark.parametrize("rotated", [False, True], ids=["", "rotated"])
@pytest.mark.parametrize("magnitude", [2.0**-24, 1e-6, 1e-2, 1.0, 30.0, 1e3])
def test_values_are_within_half_a_step_and_fp16_holds_them(magnitude: float, rotated: bool) -> None:
    for dim in DIMS:
        x = usual(dim) * magnitude
        codes, scale_TH = token_codes(x, rotated)
        scale = scale_TH[..., None].double()
        values = codes.double() * scale
        assert torch.equal(values.half().double(), values)
        assert torch.equal(scale_TH.bfloat16().float(), scale_TH)
        stored = rotate(x) if rotated else x.float()
        assert bool(((values - stored).abs() <= scale * (0.5 + 1e-5)).all())
        # the step is at most an eighth wider than it must be
        largest = stored.abs().amax(-1).double()
        assert bool((scale_TH <= (largest / 127 * 1.1251).clamp_min(2.0**-20)).all())


def test_outliers_that_rope_turns_cost_little_only_if_k_is_rotated() -> None:
    """A pair of channels a hundred times larger, whose angle follows the position."""
    k, q = usual(128, tokens=256), usual(128, tokens=256, seed=1)
    angle = torch.arange(256)[:, None] * 0.3
    k[..., 7], k[..., 71] = 100 * angle.cos(), 100 * angle.sin()

    def error(rotated: bool) -> float:
        turn: Callable[[Tensor], Tensor] = rotate if rotated else lambda x: x.float()
        codes, scale_TH = token_codes(k, rotated)
        exact = torch.einsum("qhd,khd->hqk", q.float(), k.float())
        got = torch.einsum("qhd,khd->hqk", turn(q), codes * scale_TH[..., None])
        return float((got - exact).norm()) / math.sqrt(exact.numel())

    # a step is 100 / 127 without, and about 100 / 8 / 127 more than of the others with
    assert error(True) < 1.0 < 2.0 < error(False)


# ---- the store


@given(any_bits())
def test_any_bits_at_any_slots(made: Case) -> None:
    left(made, store_kv, "cpu").check(want(made))


def test_codes_and_scales_are_read_as_decode_reads_them() -> None:
    made = case((5, 2, 64))
    got = made.on("cpu")
    caches = got.k_cache.box.view(torch.int8), got.v_cache.box.view(torch.int8)
    scales_HS = torch.zeros(2, len(caches[0]), dtype=torch.int32)
    cache = Cache(*caches, token_scales_HS=scales_HS, stats_C=got.stats)
    back = store_kv(got.k, got.v, got.slots, cache, read_back=True)
    assert back is not None
    read = cache.values(got.slots)
    for mine, other in zip(read, back, strict=True):
        assert torch.equal(mine, other.float())


@pytest.mark.parametrize("dim", DIMS)
def test_decode_over_it_is_near_attention_over_what_was_stored(dim: int) -> None:
    """Outliers in two channels of K, as biases make them, among the tokens."""
    k, v = usual(dim, tokens=96), usual(dim, tokens=96, seed=1)
    k[..., [3, 40]] += 50
    q = usual(dim, tokens=1, heads=8, seed=2)
    slots = torch.randperm(128, generator=torch.Generator().manual_seed(3))[:96]
    caches = torch.zeros(2, 128, 4, dim, dtype=torch.int8)
    scales_HS, stats = torch.zeros(4, 128, dtype=torch.int32), torch.zeros(5, dtype=torch.int64)
    cache = Cache(caches[0], caches[1], token_scales_HS=scales_HS, stats_C=stats)
    store_kv(k, v, slots, cache, read_back=False)
    pages = Pages(slots[None].int(), 1, torch.tensor([96]).int())
    scores = torch.einsum("hgd,thd->hgt", q[0].double().unflatten(0, (4, 2)), k.double())
    exact = torch.einsum("hgt,thd->hgd", (scores * dim**-0.5).softmax(-1), v.double()).flatten(0, 1)

    def error(query: Tensor) -> float:
        return float((attend(query, cache, pages, dim**-0.5)[0] - exact).norm() / exact.norm())

    assert error(rotate_queries(q)) < 0.05
    assert error(q) > 0.5  # control: as it is


# ---- controls


def swapped(pack: Any) -> Any:
    return lambda k, v: pack(v, k)


SPOILS: dict[str, tuple[Any, str, Any]] = {
    "steps of 1 / 128": (kv_int8, "LARGEST_CODE", 128),
    "K is not rotated": (kv_int8, "rotate", lambda x: x.float()),
    "sides exchanged": (kv, "pack_token_scales", swapped(kv.pack_token_scales)),
    "a block of half the size": (kv_int8, "LARGEST_BLOCK", 32),
}
"""What a wrong implementation has in the place of a name."""


@pytest.mark.parametrize("name", [*SPOILS, "V is rotated"])
def test_control_a_wrong_store_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = case((5, 2, 64))
    wanted = want(made)
    left(made, store_kv, "cpu").check(wanted)
    if name in SPOILS:
        monkeypatch.setattr(*SPOILS[name])
    else:
        made.v_THD = rotate(made.v_THD).to(BF16)
    with pytest.raises(AssertionError):
        left(made, store_kv, "cpu").check(wanted)


def test_control_the_oracle_has_the_least_scale_that_fits() -> None:
    """One four-bit step less clips the largest element."""
    x = usual(128, tokens=1, heads=1)[0, 0].float().numpy()
    _, scale = encode(x)
    assert np.abs(x).max() / float(scale) <= 127 < np.abs(x).max() / (float(scale) * 15 / 16)


# ---- what is refused


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"k": torch.zeros(3, 2, 32)}, r"\bK\b.*float32.*bfloat16"),
        ({"slots": torch.zeros(3, dtype=torch.int32)}, "slots.*int32.*int64"),
        ({"k_cache": torch.zeros(9, 2, 32, dtype=torch.uint8)}, r"K cache.*uint8.*int8 \[9"),
        ({"scales": torch.zeros(2, 9)}, r"scales of tokens.*float32.*int32 \[2, 9\]"),
        ({"scales": torch.zeros(9, 2, dtype=torch.int32)}, r"scales of tokens.*int32 \[2, 9\]"),
        ({"scales": torch.zeros(9, 2, dtype=torch.int32).t()}, "last stride 1"),
        ({"stats": torch.zeros(5)}, "statistics.*float32.*int64"),
    ],
)
def test_what_does_not_fit_is_a_sentence(change: dict[str, Tensor], sentence: str) -> None:
    given = {
        "k": torch.zeros(3, 2, 32, dtype=BF16),
        "v": torch.zeros(3, 2, 32, dtype=BF16),
        "slots": torch.arange(3),
        "k_cache": torch.zeros(9, 2, 32, dtype=torch.int8),
        "v_cache": torch.zeros(9, 2, 32, dtype=torch.int8),
        "scales": torch.zeros(2, 9, dtype=torch.int32),
        "stats": torch.zeros(5, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=sentence):
        k, v, slots, *caches, scales_HS, stats = (given | change).values()
        cache = Cache(*caches, token_scales_HS=scales_HS, stats_C=stats)
        store_kv(k, v, slots, cache, read_back=False)
