"""The KV store's kernel against its reference and against the NumPy oracle, byte for byte."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from numpy.typing import NDArray
from triton.runtime import interpreter

from sgl_fp8rl.ops import kv, kv_int8_triton, kv_triton
from tests.gpu.conftest import INTERPRETED
from tests.kv_oracle import Case, Got, any_usual_case, bits_of, bytes_of, case, plant

Tensor = torch.Tensor
BF16, FP16 = torch.bfloat16, torch.float16


def stored(made: Case, device: str, *, read_back: bool = True) -> Got:
    """What the kernel leaves; it must be what the oracle and the reference leave."""
    got = made.on(device).run(kv_triton.store_kv, read_back=read_back)
    got.check(made.want())
    assert_as_twin(got, made.on("cpu").run(kv.store_kv, read_back=read_back))
    return got


def assert_as_twin(got: Got, reference: Got) -> None:
    """Both caches, with all around them, the statistics, and what was read back."""
    assert torch.equal(got.k_cache.buffer.cpu(), reference.k_cache.buffer)
    assert torch.equal(got.v_cache.buffer.cpu(), reference.v_cache.buffer)
    assert got.stats.tolist() == reference.stats.tolist()
    assert (got.back is None) == (reference.back is None)
    for mine, other in zip(got.back or (), reference.back or (), strict=True):
        assert mine.dtype == other.dtype and mine.is_contiguous()
        np.testing.assert_array_equal(mine.float().cpu().numpy(), other.float().numpy())


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("gap", [0, 3, 16], ids=["whole", "odd-gaps", "gaps"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 16), (1, 8, 128), (5, 2, 80), (3, 3, 256), (9, 6, 48), (40, 1, 64)], ids=str
)
def test_what_a_store_leaves(
    device: str, shape: tuple[int, int, int], dtype: torch.dtype, gap: int
) -> None:
    stored(case(shape, dtype=dtype, gap=gap, seed=sum(shape)), device)


@pytest.mark.parametrize(("k_dim", "v_dim"), [(128, 64), (48, 256), (192, 128)])
@pytest.mark.parametrize("read_back", [False, True], ids=["", "read-back"])
def test_k_and_v_of_different_head_dims(
    device: str, k_dim: int, v_dim: int, read_back: bool
) -> None:
    stored(case((5, 2, k_dim), v_dim=v_dim), device, read_back=read_back)


def test_one_scale_a_layer_and_padding_tokens(device: str) -> None:
    made = case((9, 4, 32), padding=True)
    made.k_scale_H = torch.tensor(0.037).expand(4)
    got = stored(made, device)
    assert got.stats.tolist()[0] == made.before[0] + 8
    assert got.stats.tolist()[3] < bits_of(6e4)


@pytest.mark.parametrize("count", [0, 1, 5, 70])
def test_padding_tokens_alone_and_no_tokens(device: str, count: int) -> None:
    made = case((count, 2, 32))
    made.slots_T.zero_()
    got = made.on(device).run(kv_triton.store_kv, read_back=True)
    assert got.stats.tolist() == list(made.before)
    assert got.back is not None and got.back[0].shape == (count, 2, 32)


@pytest.mark.parametrize("side", [0, 1], ids="KV")
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf, 6e4, -0.0], ids=str)
def test_what_is_no_number(device: str, value: float, side: int) -> None:
    made = case((3, 2, 32), spread=0.01)
    got = stored(plant(made, value, side=side), device)
    codes = bytes_of((got.k_cache, got.v_cache)[side].box)
    want = 0x7F if math.isnan(value) else 0x80 if value == 0 else 0xFE if value < 0 else 0x7E
    assert codes[int(made.slots_T[0]), -1, 3] == want


def test_statistics_add_up_and_the_largest_stays(device: str) -> None:
    first, second = case((6, 2, 64), spread=3), case((6, 2, 64), spread=0.1, seed=1)
    got = first.on(device).run(kv_triton.store_kv)
    after_first = got.stats.tolist()
    assert after_first == first.want()[2]
    second.before = tuple(after_first)
    again = second.on(device).run(kv_triton.store_kv)
    assert again.stats.tolist() == second.want()[2]
    assert again.stats.tolist()[0] == after_first[0] + 6
    assert again.stats.tolist()[3] == after_first[3] > bits_of(float(second.k_THD.abs().max()))


def assert_twin(made: Case, device: str) -> Got:
    """The kernel leaves what the reference does."""
    got = made.on(device).run(kv_triton.store_kv, read_back=True)
    assert_as_twin(got, made.on("cpu").run(kv.store_kv, read_back=True))
    return got


def test_many_tokens(device: str) -> None:
    # Enough for large programs without being asked to, and no whole number of them.
    made = case((1025, 8, 128), spread=1.5, padding=True)
    assert made.k_THD.numel() >= kv_int8_triton._MANY
    assert assert_twin(made, device).stats.tolist()[0] == made.before[0] + 1024


@given(any_usual_case)
@settings(max_examples=10 if INTERPRETED else 60)
def test_any_store(device: str, made: Case) -> None:
    assert_twin(made, device)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU's own cast saturates")
def test_control_the_clamp_is_what_saturates(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    convert = interpreter._convert_float

    def unsaturated(x: NDArray[Any], source: tl.dtype, target: tl.dtype, rounding: object) -> Any:
        """As torch 2.11 casts, whatever the version is here: NaN from past 464."""
        if target == tl.float8e4nv:
            x = x.view(np.float32)
            x = np.where(np.abs(x) > 464, np.float32(np.nan), x)
        return convert(x, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", unsaturated)
    made = case((2, 2, 32), spread=9)
    made.on(device).run(kv_triton.store_kv).check(made.want())
    monkeypatch.setattr(kv_triton, "saturate", lambda quotient: quotient)
    with pytest.raises(AssertionError, match="codes of K differ"):
        made.on(device).run(kv_triton.store_kv).check(made.want())


def test_what_does_not_fit_is_a_sentence(device: str) -> None:
    got = case((3, 2, 32)).on(device)
    got.slots = got.slots.int()
    with pytest.raises(ValueError, match=r"slots came as torch\.int32"):
        got.run(kv_triton.store_kv)
    assert not bool(got.k_cache.box.view(torch.uint8).any())


# ---- only on a GPU


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_value_by_many_scales_exhaustive(device: str, dtype: torch.dtype) -> None:
    # All bits of 16, by 4096 scales of all magnitudes; each head reads the same memory.
    H = 64
    x = torch.arange(65536, device=device).to(torch.uint16).view(dtype)
    x_THD = x.reshape(512, 1, 128).expand(512, H, 128)
    slots = torch.arange(1, 513, device=device)
    random = torch.Generator().manual_seed(0)

    def left_by(store_kv: Any, where: str, scales: Tensor) -> list[NDArray[Any]]:
        caches = torch.zeros(2, 513, H, 128, dtype=torch.uint8, device=where)
        stats = torch.zeros(kv.STATS, dtype=torch.int64, device=where)
        given = (t.to(where) for t in (x_THD, x_THD, slots))
        codes = caches.view(torch.float8_e4m3fn)
        store_kv(*given, kv.Cache(*codes, *scales.to(where), stats_C=stats), read_back=False)
        return [caches.cpu().numpy(), stats.cpu().numpy()]

    for _ in range(64):
        scales = torch.exp2(torch.rand(2, H, generator=random) * 200 - 100)
        mine = left_by(kv_triton.store_kv, device, scales)
        for got, want in zip(mine, left_by(kv.store_kv, "cpu", scales), strict=True):
            np.testing.assert_array_equal(got, want)
