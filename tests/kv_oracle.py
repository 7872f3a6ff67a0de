"""Stores of an FP8 KV cache in NumPy and plain loops, and cases to hold any ``store_kv`` against.

The oracle shares no code with ``sgl_fp8rl.ops``: E4M3 is the table of its 256 values in
``tests/oracle.py``, the quotient is taken in float64 and rounded, and every element is counted by
itself. Shape suffixes as in ``sgl_fp8rl.ops.kv``.
"""

import math
import struct
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from sgl_fp8rl.ops import kv
from tests import oracle

Tensor = torch.Tensor
Codes = NDArray[np.uint8]
F32 = NDArray[np.float32]

FP8 = torch.float8_e4m3fn
CANARY = 0xA5
SLOTS = 12
"""More than the tokens of a case by this."""


def encode(x_D: F32, scale: float) -> tuple[Codes, F32]:
    """Codes of ``x / scale``, and the FP32 quotients; NaN is 0x7F, Inf is 448."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        # Exact: a quotient of FP32 rounded to float64 and then to FP32 is rounded once, unless it
        # is an FP32 denormal, whose code is 0 either way.
        quotients = (x_D.astype(np.float64) / np.float64(scale)).astype(np.float32)
    return np.where(np.isnan(quotients), 0x7F, oracle.encode(quotients)).astype(np.uint8), quotients


def bits_of(value: float) -> int:
    """The FP32 bits of the magnitude."""
    return int(struct.unpack("<I", struct.pack("<f", abs(value)))[0])


def store(
    x_THD: F32, slots_T: list[int], cache_SHD: Codes, scale_H: list[float]
) -> tuple[int, int, int]:
    """Write one side; (counted tokens, clipped elements, bits of the largest finite magnitude)."""
    tokens = clipped = top = 0
    for x_HD, slot in zip(x_THD, slots_T, strict=True):
        tokens += slot != 0
        for h, scale in enumerate(scale_H):
            cache_SHD[slot, h], quotients = encode(x_HD[h], scale)
            if slot == 0:
                continue
            for x, quotient in zip(x_HD[h].tolist(), quotients.tolist(), strict=True):
                clipped += abs(quotient) > 448
                if math.isfinite(x):
                    top = max(top, bits_of(x))
    return tokens, clipped, top


class Store(Protocol):
    """``store_kv`` of the reference or of the kernel."""

    def __call__(
        self, k_THD: Tensor, v_THD: Tensor, slots_T: Tensor, cache: kv.Cache, *, read_back: bool
    ) -> tuple[Tensor, Tensor] | None: ...


class Cache:
    """``[slots, heads, dim]`` with gaps between slots and between heads, canaries all around."""

    def __init__(self, shape: tuple[int, int, int], gap: int, device: str) -> None:
        slots, heads, dim = shape
        self.strides = ((dim + gap) * heads + 2 * gap, dim + gap, 1)
        size = slots * self.strides[0] + 2 * 64
        self.buffer = torch.full((size,), CANARY, dtype=torch.uint8, device=device)
        self.shape = shape
        self.box = self._view(self.buffer).view(FP8)
        self._view(self.buffer).zero_()

    def _view(self, buffer: Tensor) -> Tensor:
        return buffer.as_strided(self.shape, self.strides, 64)

    def assert_around(self) -> None:
        """Nothing but the slots was written."""
        around = self.buffer.clone()
        self._view(around).fill_(CANARY)
        assert bool((around == CANARY).all()), "bytes beside the cache were written"


@dataclass
class Case:
    """What one call stores, on the CPU; ``run`` holds a ``store_kv`` against the oracle."""

    k_THD: Tensor
    v_THD: Tensor
    slots_T: Tensor
    k_scale_H: Tensor
    v_scale_H: Tensor
    gap: int = 0
    """Bytes between heads of the cache, elements between heads of k and v."""
    before: tuple[int, int, int, int, int] = (5, 1, 2, 0, 0)
    """The statistics so far."""

    def on(self, device: str) -> "Got":
        """Tensors as an engine has them: k and v are slices of one wider tensor."""
        T, H, D = self.k_THD.shape
        v_dim = self.v_THD.shape[2]
        k_end = 64 + H * (D + self.gap)
        row = torch.zeros(T, k_end + H * (v_dim + self.gap), dtype=self.k_THD.dtype, device=device)
        k = row[:, 64:k_end].unflatten(1, (H, D + self.gap))[..., :D]
        v = row[:, k_end:].unflatten(1, (H, v_dim + self.gap))[..., :v_dim]
        k.copy_(self.k_THD)
        v.copy_(self.v_THD)
        caches = [Cache((SLOTS + T, H, dim), self.gap, device) for dim in (D, v_dim)]
        scales = self.k_scale_H.to(device), self.v_scale_H.to(device)
        stats = torch.tensor(self.before, device=device)
        return Got(k, v, self.slots_T.to(device), caches[0], caches[1], *scales, stats)

    def want(self) -> tuple[Codes, Codes, list[int]]:
        """Both caches and the statistics, by the oracle."""
        caches, stats = [], list(self.before)
        sides = (self.k_THD, self.k_scale_H), (self.v_THD, self.v_scale_H)
        for side, (x, scale) in enumerate(sides):
            cache, slots = np.zeros((SLOTS + len(x), *x.shape[1:]), np.uint8), self.slots_T.tolist()
            tokens, clipped, top = store(x.float().numpy(), slots, cache, scale.tolist())
            caches.append(cache)
            stats[1 + side] += clipped
            stats[3 + side] = max(stats[3 + side], top)
        stats[0] += tokens
        return caches[0], caches[1], stats


@dataclass
class Got:
    """The arguments of a call, and after it what it left."""

    k: Tensor
    v: Tensor
    slots: Tensor
    k_cache: Cache
    v_cache: Cache
    k_scale: Tensor
    v_scale: Tensor
    stats: Tensor
    back: tuple[Tensor, Tensor] | None = None

    def run(self, store_kv: Store, *, read_back: bool = False) -> "Got":
        """Call it; returns self."""
        caches, scales = (self.k_cache.box, self.v_cache.box), (self.k_scale, self.v_scale)
        cache = kv.Cache(*caches, *scales, stats_C=self.stats)
        self.back = store_kv(self.k, self.v, self.slots, cache, read_back=read_back)
        return self

    def check(self, want: tuple[Codes, Codes, list[int]]) -> None:
        """Caches, statistics and what was read back are those of ``want``, byte for byte."""
        for name, cache, codes in (("K", self.k_cache, want[0]), ("V", self.v_cache, want[1])):
            cache.assert_around()
            wrong = np.argwhere(bytes_of(cache.box) != codes)
            assert not len(wrong), f"{len(wrong)} codes of {name} differ, first at {wrong[0]}"
        assert self.stats.tolist() == want[2], "statistics differ"
        if self.back is not None:
            for x, back, codes in zip((self.k, self.v), self.back, want[:2], strict=True):
                assert back.dtype == x.dtype and back.shape == x.shape and back.is_contiguous()
                values = oracle.decode(codes[self.slots.cpu().numpy()])
                read = back.cpu().double().numpy()
                np.testing.assert_array_equal(read, values)
                same = np.isnan(values) | (np.signbit(read) == np.signbit(values))
                assert same.all(), "signs of zeros differ"


def bytes_of(tensor: Tensor) -> NDArray[Any]:
    """The bytes of FP8 codes, in their shape."""
    return tensor.view(torch.uint8).cpu().numpy()


def case(
    shape: tuple[int, int, int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    v_dim: int = 0,
    seed: int = 0,
    gap: int = 0,
    spread: float = 1.0,
    padding: bool = False,
) -> Case:
    """Random k and v, with special values planted, in random order of slots.

    Args:
        spread: the standard deviation of x / scale is about 100 times this.
        padding: the last token is a padding token.
    """
    T, H, D = shape
    random = torch.Generator().manual_seed(seed)
    middles = torch.from_numpy((oracle.E4M3[:126] + oracle.E4M3[1:127]) / 2).float()
    # Head 0: a power of two, where midpoints of codes are met exactly. The others: any FP32 by
    # which one value that is planted below comes as near to a midpoint as can be.
    middle_2H = middles[torch.randint(8, 126, (2, H), generator=random)]
    near_2H = (torch.exp2(torch.rand(2, H, generator=random) * 16 - 12) * middle_2H).to(dtype)
    scale_2H = near_2H.float() / middle_2H
    scale_2H[:, 0] = torch.tensor([0.25, 2.0])
    sides = []
    for scale_H, near_H, dim in zip(scale_2H, near_2H, (D, v_dim or D), strict=True):
        x = torch.randn(T, H, dim, generator=random) * 100 * spread * scale_H[:, None]
        x[:, :, 8] = near_H
        pick = torch.randint(0, 126, (T, dim // 2), generator=random)
        sign = torch.randint(0, 2, (T, dim // 2), generator=random) * 2 - 1
        x[:, 0, : dim // 2] = middles[pick] * sign * scale_H[0]
        x[:, :, -6:] = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 2**-9, -(2**-10)])
        sides.append(x.to(dtype))
    slots = torch.randperm(SLOTS + T - 1, generator=random)[:T] + 1
    if padding:
        slots[-1] = 0
        for x in sides:
            x[-1] = 6e4  # garbage that must not be counted
    return Case(sides[0], sides[1], slots, scale_2H[0], scale_2H[1], gap)


def plant(where: Case, value: float, *, side: int = 0) -> Case:
    """``value`` at one element of the first token's last head; the sign of NaN is kept."""
    x_THD = (where.k_THD, where.v_THD)[side]
    x_THD[0, -1, 3] = value
    if math.isnan(value) and math.copysign(1, value) < 0:
        x_THD.view(torch.int16)[0, -1, 3] = -0x40  # 0xFFC0: a cast to BF16 drops the sign
    return where


any_usual_case = st.builds(
    case,
    st.tuples(
        st.integers(1, 20), st.integers(1, 9), st.sampled_from([*range(16, 129, 16), 192, 256])
    ),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    gap=st.sampled_from([0, 1, 8, 16]),
    padding=st.booleans(),
    spread=st.floats(0.01, 10),
    seed=st.integers(0, 2**32 - 1),
)
# NaN and Inf of BF16 and of FP16, and zeros
SPECIAL = [0x7FC0, 0xFFC1, 0x7F80, 0xFF80, 0x7E00, 0xFE01, 0x7C00, 0xFC00, 0x0000, 0x8000, 0x0001]


@st.composite
def any_bits(draw: st.DrawFn) -> Case:
    """Any bits at any slots, that of padding tokens among them."""
    T, H, D = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.sampled_from([16, 48, 64]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16]))
    word = st.integers(0, 65535) | st.sampled_from(SPECIAL)
    bits = draw(st.lists(word, min_size=16, max_size=64))
    scale = st.floats(2.0**-20, 2.0**10, width=32, exclude_min=True)
    scale_2H = torch.tensor(draw(st.lists(scale, min_size=2 * H, max_size=2 * H))).view(2, H)

    def spread(start: int) -> Tensor:
        words = [bits[(start + i * i) % len(bits)] for i in range(T * H * D)]
        return torch.tensor(words, dtype=torch.int32).to(torch.uint16).view(dtype).view(T, H, D)

    slots_T = torch.tensor(draw(st.permutations(range(8)))[:T])
    return Case(spread(0), spread(7), slots_T, *scale_2H, draw(st.integers(0, 5)))
