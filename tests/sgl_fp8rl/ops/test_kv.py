"""The reference of the KV store against the NumPy oracle, byte for byte.

``tests/gpu/test_kv_triton.py`` holds kernel and reference against it in more shapes.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given

from sgl_fp8rl.ops.kv import STATS, kv_codes, store_kv
from tests import kv_oracle, oracle
from tests.kv_oracle import Case, Got, any_bits, bits_of, case

Tensor = torch.Tensor
BF16, FP16 = torch.bfloat16, torch.float16
NAN, INF = math.nan, math.inf
SCALES = [1.0, 2.0**-12, 0.0123, 0.1, 1 / 3, 7.7, 3e-5, 448.0, 1e-30, 2.0**-130, 1e30]


def codes_of(values: list[float], scale: float = 1.0, dtype: torch.dtype = BF16) -> list[int]:
    x_THD = torch.tensor(values).to(dtype).reshape(1, 1, -1)
    codes = kv_codes(x_THD, torch.tensor([scale]))
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == x_THD.shape
    return [int(code) for code in codes.view(torch.uint8).flatten()]


BY_HAND = [
    *((0.0, 0x00), (-0.0, 0x80), (1.0, 0x38), (-1.0, 0xB8), (1e-40, 0x00), (-1e-40, 0x80)),
    *((2.0**-9, 0x01), (7 * 2.0**-9, 0x07)),  # the least denormal and the largest
    *((2.0**-10, 0x00), (-(2.0**-10), 0x80), (3 * 2.0**-10, 0x02)),  # ties, to the even code
    *((2.0**-6, 0x08), (1.0625, 0x38), (1.1875, 0x3A)),
    *((432.0, 0x7E), (448.0, 0x7E), (464.0, 0x7E), (466.0, 0x7E), (1e30, 0x7E), (-466.0, 0xFE)),
    *((INF, 0x7E), (-INF, 0xFE), (NAN, 0x7F), (-NAN, 0x7F)),
]


def test_codes_that_were_worked_out_by_hand() -> None:
    for value, code in BY_HAND:
        assert codes_of([value]) == [code], value
        assert codes_of([value] * 33) == [code] * 33, f"{value}, vectorized"


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_codes_of_every_value_exhaustive(dtype: torch.dtype, scale: float) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
    codes = kv_codes(x.reshape(1, 1, -1), torch.tensor([scale])).view(torch.uint8).flatten()
    want, _ = kv_oracle.encode(x.float().numpy(), float(torch.tensor(scale)))
    np.testing.assert_array_equal(codes.numpy(), want)


@given(any_bits())
def test_any_bits_at_any_slots(made: Case) -> None:
    made.on("cpu").run(store_kv, read_back=True).check(made.want())


def test_statistics_that_were_counted_by_hand() -> None:
    k_THD = torch.zeros(3, 2, 16, dtype=BF16)
    v_THD = torch.ones(3, 2, 16, dtype=BF16)
    k_THD[0, 0, :4] = torch.tensor([448.0, 450.0, -466.0, 1.0])  # scale 1: two are clipped
    k_THD[1, 1, :4] = torch.tensor([224.0, 226.0, -INF, NAN])  # scale 0.5: two
    v_THD[2, 0, 5] = -3.5
    made = Case(k_THD, v_THD, torch.tensor([4, 2, 9]), torch.tensor([1.0, 0.5]), torch.ones(2))
    made.before = (10, 20, 30, bits_of(500.0), bits_of(2.0))
    got = made.on("cpu").run(store_kv)
    assert got.stats.tolist() == [13, 24, 30, bits_of(500.0), bits_of(3.5)]
    # Again: counts add up, and the largest magnitude is that of all calls.
    got.run(store_kv)
    assert got.stats.tolist() == [16, 28, 30, bits_of(500.0), bits_of(3.5)]
    top = torch.tensor(got.stats.tolist()[4], dtype=torch.int32).view(torch.float32)
    assert float(top) == 3.5  # as a reader decodes it


def unsaturated(got: Got) -> None:
    """As a cast does without a clamp: NaN from past 464."""
    codes = got.k_cache.box.view(torch.uint8)
    for t, slot in enumerate(got.slots.tolist()):
        past = (got.k[t].float() / got.k_scale[:, None]).abs() > 464
        codes[slot] = torch.where(past, 0x7F, codes[slot])


def by_reciprocal(got: Got) -> None:
    """A product with 1 / scale in the place of the division."""
    x = got.k.float() * (1 / got.k_scale)[:, None]
    codes = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    got.k_cache.box.view(torch.uint8)[got.slots] = codes


def cut(got: Got) -> None:
    """Rounded towards zero in the place of to nearest."""
    _, quotients = kv_oracle.encode(got.k.float().numpy(), 1.0)
    scaled = np.abs(quotients / got.k_scale.numpy()[:, None]).clip(0, 448)
    codes = np.searchsorted(oracle.E4M3[:127], scaled, side="right") - 1
    signs = np.signbit(quotients) * 128
    got.k_cache.box.view(torch.uint8)[got.slots] = torch.from_numpy(
        (codes + signs).astype(np.uint8)
    )


def nan_where_largest(got: Got) -> None:
    codes = got.k_cache.box.view(torch.uint8)
    codes[codes == 0x7E] = 0x7F


def code_of_another_head(got: Got) -> None:
    codes = got.k_cache.box.view(torch.uint8)
    codes.copy_(codes.flip(1).clone())


def slot_of_another_token(got: Got) -> None:
    codes = got.v_cache.box.view(torch.uint8)
    codes[got.slots] = codes[got.slots.flip(0)].clone()


def run_again(got: Got, **changes: Tensor) -> None:
    got.stats.copy_(torch.tensor([5, 1, 2, 0, 0]))
    for name, value in changes.items():
        setattr(got, name, value)
    got.run(store_kv)


def one_value_read_back(got: Got) -> None:
    assert got.back is not None
    got.back[1][0, 0, 0] += 8


SPOILS: dict[str, Callable[[Got], object]] = {
    "no saturation": unsaturated,
    "reciprocals": by_reciprocal,
    "cut off": cut,
    "read back": one_value_read_back,
    "NaN for 448": nan_where_largest,
    "one scale": lambda got: run_again(got, k_scale=got.k_scale.max().expand(len(got.k_scale))),
    "scales swapped": lambda got: run_again(got, k_scale=got.v_scale, v_scale=got.k_scale),
    "ulp of a scale": lambda got: run_again(
        got, k_scale=(got.k_scale.view(torch.int32) + 1).view(torch.float32)
    ),
    "heads": code_of_another_head,
    "tokens": slot_of_another_token,
    "clipped": lambda got: got.stats[2].add_(1),
    "largest": lambda got: got.stats[3].add_(1),
    "beside": lambda got: got.v_cache.buffer[-1:].zero_(),
}
"""What a wrong store would leave, of kernels as well: the same ``check`` judges them."""


@pytest.mark.parametrize("name", SPOILS)
def test_control_a_wrong_store_is_seen(name: str) -> None:
    made = case((7, 16, 32), spread=2.0)
    want = made.want()
    got = made.on("cpu").run(store_kv, read_back=True)
    got.check(want)
    SPOILS[name](got)
    with pytest.raises(AssertionError):
        got.check(want)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"k": torch.zeros(3, 2, 32)}, r"\bK\b.*float32.*bfloat16"),
        ({"v": torch.zeros(3, 64, dtype=BF16)}, r"\bV\b.*bfloat16 \[3, 2, 64\]"),
        ({"v": torch.zeros(3, 2, 32, dtype=FP16)}, r"\bV\b.*float16.*bfloat16 \[3"),
        ({"k": torch.zeros(4, 2, 32, dtype=BF16)}, r"\bV\b.*\[4, 2, 32\]"),
        ({"k": torch.zeros(3, 2, 48, dtype=BF16)}, r"K cache.*\[\d+, 2, 48\]"),
        ({"v": torch.zeros(3, 2, 64, dtype=BF16)[..., ::2]}, r"\bV\b.*last stride"),
        ({"slots": torch.zeros(3, dtype=torch.int32)}, "slots.*int32.*int64"),
        ({"slots": torch.zeros(2, dtype=torch.int64)}, r"slots.*\[2\].*\[3\]"),
        ({"k_scale": torch.ones(())}, r"K scales.*float32 \[2\]"),
        ({"v_scale": torch.ones(2, dtype=BF16)}, "V scales.*bfloat16.*float32"),
        ({"stats": torch.zeros(4, dtype=torch.int64)}, rf"statistics.*int64 \[{STATS}\]"),
        ({"stats": torch.zeros(5)}, "statistics.*float32.*int64"),
    ],
)
def test_what_does_not_fit_is_a_sentence(change: dict[str, Tensor], sentence: str) -> None:
    got = case((3, 2, 32)).on("cpu")
    for name, value in change.items():
        setattr(got, name, value)
    with pytest.raises(ValueError, match=sentence):
        got.run(store_kv)
    assert not bool(got.k_cache.box.view(torch.uint8).any())
