"""The INT8 store's kernel against its reference and the NumPy oracle, byte for byte."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from sgl_fp8rl.ops import kv, kv_int8, kv_int8_triton
from sgl_fp8rl.ops.kv_triton import store_kv
from tests.gpu.conftest import INTERPRETED
from tests.kv_int8_oracle import left, want
from tests.kv_oracle import Case, any_usual_case, case, plant

BF16, FP16 = torch.bfloat16, torch.float16
DIMS = [16, 64, 80, 96, 128, 192, 256]


def assert_as_twin(made: Case, device: str, *, but: tuple[int, ...] = ()) -> None:
    """The kernel leaves what the reference does."""
    reference = left(made, kv.store_kv, "cpu")
    left(made, store_kv, device).check(reference, but=but)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("gap", [0, 3, 16], ids=["whole", "odd-gaps", "gaps"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_what_a_store_leaves(device: str, dim: int, dtype: torch.dtype, gap: int) -> None:
    made = case((5, 3, dim), dtype=dtype, gap=gap, seed=dim, padding=True)
    wanted = want(made)
    left(made, store_kv, device).check(wanted)
    left(made, store_kv, device, read_back=False).check(wanted)


@pytest.mark.parametrize(("k_dim", "v_dim"), [(128, 64), (48, 256), (192, 128)])
def test_k_and_v_of_different_head_dims(device: str, k_dim: int, v_dim: int) -> None:
    made = case((5, 2, k_dim), v_dim=v_dim)
    left(made, store_kv, device).check(want(made))


@pytest.mark.parametrize("side", [0, 1], ids="KV")
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf, 6e4, 3e38], ids=str)
def test_what_is_no_number(device: str, value: float, side: int) -> None:
    made = plant(case((3, 2, 64), spread=0.01), value, side=side)
    left(made, store_kv, device).check(want(made))


@pytest.mark.parametrize("scale", [0.0, 1e-38, 2.0**-24, 1e-6, 1e3, 1e30, 3e38])
def test_tiny_and_huge_values(device: str, scale: float) -> None:
    made = case((4, 2, 128))
    k, v = ((x.float() / 100 * scale).to(BF16) for x in (made.k_THD, made.v_THD))
    assert_as_twin(replace(made, k_THD=k, v_THD=v), device)


@pytest.mark.parametrize("count", [0, 1, 5, 70])
def test_padding_tokens_alone_and_no_tokens(device: str, count: int) -> None:
    made = case((count, 2, 32))
    made.slots_T.zero_()
    assert_as_twin(made, device, but=(0,) if count > 1 else ())
    assert left(made, store_kv, device).stats == list(made.before)


def test_statistics_add_up_and_the_largest_stays(device: str) -> None:
    first, second = case((6, 2, 64), spread=300), case((6, 2, 64), spread=0.1, seed=1)
    first.k_THD[2, 1] *= 1e4
    after = left(first, store_kv, device).stats
    assert after == want(first).stats and after[1] > first.before[1]
    second.before = (after[0], after[1], after[2], after[3], after[4])
    assert left(second, store_kv, device).stats == want(second).stats


@pytest.mark.skipif(INTERPRETED, reason="many programs at once")
def test_many_tokens(device: str) -> None:
    # enough for large programs without being asked to, and no whole number of them
    made = case((1025, 8, 128), padding=True)
    assert made.k_THD.numel() >= kv_int8_triton._MANY
    assert_as_twin(made, device)


@given(any_usual_case)
@settings(max_examples=8 if INTERPRETED else 60)
def test_any_store(device: str, made: Case) -> None:
    assert_as_twin(made, device)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_queries(device: str, dim: int, dtype: torch.dtype) -> None:
    made = case((5, 6, dim), dtype=dtype, gap=3)
    made.k_THD[0, 0], made.k_THD[1, 0, 3], made.k_THD[2, 0, 3] = 6e4, math.inf, math.nan
    got, cpu = made.on(device).k, made.on("cpu").k
    mine, other = kv_int8_triton.rotate_queries(got).cpu(), kv_int8.rotate_queries(cpu)
    assert mine.is_contiguous() and mine.shape == other.shape
    assert torch.equal(mine.isnan(), other.isnan()) and bool(mine.isnan().any())
    assert torch.equal(mine.nan_to_num(), other.nan_to_num())


def test_outputs_are_cast_as_torch_does(device: str) -> None:
    every = torch.arange(65536).to(torch.uint16).view(FP16)[:65535]
    mine, wanted = kv_int8_triton.to_bf16(every.to(device)).cpu(), every.to(BF16)
    assert mine.dtype == BF16
    assert bool(((mine == wanted) | (mine.isnan() & wanted.isnan())).all())


def test_what_does_not_fit_is_a_sentence(device: str) -> None:
    made = case((3, 2, 32))
    made.slots_T = made.slots_T.int()
    with pytest.raises(ValueError, match=r"slots came as torch\.int32"):
        left(made, store_kv, device)


# ---- only on a GPU


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_value_beside_many_others_exhaustive(device: str, dtype: torch.dtype) -> None:
    x = torch.arange(65536).to(torch.uint16).view(dtype)
    random = torch.Generator().manual_seed(0)
    for _ in range(16):
        order = torch.randperm(65536, generator=random)
        largest = torch.rand(512, 1, 1, generator=random) * 40 - 20
        k = x[order].view(512, 1, 128).float()
        k = torch.minimum(k.abs(), torch.exp2(largest)).copysign(k).to(dtype)
        made = case((512, 1, 128), dtype=dtype)
        assert_as_twin(replace(made, k_THD=k, v_THD=k), device)
