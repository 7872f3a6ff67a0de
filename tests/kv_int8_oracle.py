"""INT8 stores of a KV cache in NumPy and plain loops, to hold any ``store_kv`` against.

The oracle shares no code with ``sgl_fp8rl.ops``: the rotation recurses over even and odd channels,
scales are rounded by ``frexp``, codes by comparing with the integers around them. What the contract
computes in FP32 (sums, the factor, both quotients) is so here, and bytes must be equal.
Shape suffixes as in ``sgl_fp8rl.ops.kv_int8``.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_fp8rl.ops.kv import Cache
from tests.kv_oracle import SLOTS, Case, Store, bits_of, bytes_of

Tensor = torch.Tensor
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Int8s = NDArray[np.int8]
Words = NDArray[np.uint32]

BLOCKS = {16: 16, 32: 32, 48: 16, 64: 64, 80: 16, 96: 32, 128: 128, 192: 64, 256: 256}
"""Channels that are rotated together, by head dim."""
UNUSED = 0x5A5A5A5A
"""Scales of slots that no token has."""


def sums(x: F32) -> F32:
    """Sums of +-x in the order of the contract: neighbours first."""
    if len(x) == 1:
        return x
    even, odd = x[0::2], x[1::2]
    out = np.empty_like(x)
    with np.errstate(all="ignore"):
        out[0::2], out[1::2] = sums(even + odd), sums(even - odd)
    return out


def rotated(x_D: F32) -> F32:
    """One head."""
    block = BLOCKS[len(x_D)]
    with np.errstate(all="ignore"):
        parts = [sums(part) * np.float32(block**-0.5) for part in x_D.reshape(-1, block)]
    return np.concatenate(parts)


def matrix(dim: int) -> F64:
    """What ``rotated`` multiplies by, in float64."""
    block = BLOCKS[dim]
    one = np.ones((1, 1))
    while len(one) < block:
        one = np.block([[one, one], [one, -one]])
    return np.kron(np.eye(dim // block), one) / math.sqrt(block)


def encode(x_D: F32) -> tuple[Int8s, np.float32]:
    """The codes of one head, and their scale."""
    top = np.float32(0)
    for x in x_D:
        if math.isnan(x):
            return np.zeros(len(x_D), np.int8), np.float32("nan")
        top = max(top, abs(x))
    least = min(max(float(top / np.float32(127)), 2.0**-20), 2.0**9)
    mantissa, exponent = math.frexp(least)  # at least a half: four bits are sixteenths
    scale = np.float32(math.ldexp(math.ceil(mantissa * 16), exponent - 4))
    return np.array([_nearest(float(x / scale)) for x in x_D], np.int8), scale


def _nearest(quotient: float) -> int:
    if abs(quotient) >= 127:
        return int(math.copysign(127, quotient))
    below = math.floor(quotient)
    rest = quotient - below
    return below + (rest > 0.5 or (rest == 0.5 and below % 2 == 1))


def word(k_scale: np.float32, v_scale: np.float32) -> int:
    """Both scales as they are stored."""
    k, v = (int(np.float32(scale).view(np.uint32)) for scale in (k_scale, v_scale))
    return k >> 16 | v >> 16 << 16


@dataclass
class Left:
    """What a store leaves."""

    codes: tuple[NDArray[Any], NDArray[Any]]
    """uint8 ``[S, H, D]``."""
    scales_HS: Words
    stats: list[int]
    back: tuple[NDArray[Any], NDArray[Any]] | None

    def check(self, want: "Left", *, but: tuple[int, ...] = ()) -> None:
        """The same bytes, but for these slots; NaN is NaN."""
        slots = [slot for slot in range(self.scales_HS.shape[1]) if slot not in but]
        for name, mine, other in zip("KV", self.codes, want.codes, strict=True):
            wrong = np.argwhere(mine[slots] != other[slots])
            assert not len(wrong), f"{len(wrong)} codes of {name} differ, first at {wrong[0]}"
        wrong = np.argwhere(self.scales_HS[:, slots] != want.scales_HS[:, slots])
        assert not len(wrong), f"{len(wrong)} scales differ, first at {wrong[0]}"
        assert self.stats == want.stats, "statistics differ"
        if self.back is not None and want.back is not None:
            for mine, other in zip(self.back, want.back, strict=True):
                np.testing.assert_array_equal(mine, other)


def left(made: Case, store: Store, device: str, *, read_back: bool = True) -> Left:
    """What this store leaves; nothing beside caches and scales may be written."""
    got = made.on(device)
    slots, heads, _ = got.k_cache.shape
    rows = torch.full((heads + 2, slots), UNUSED, dtype=torch.int32, device=device)
    scales_HS = rows[1:-1]
    caches = got.k_cache, got.v_cache
    codes = [cache.box.view(torch.int8) for cache in caches]
    into = Cache(codes[0], codes[1], token_scales_HS=scales_HS, stats_C=got.stats)
    back = store(got.k, got.v, got.slots, into, read_back=read_back)
    assert (back is not None) == read_back
    assert bool((rows[[0, -1]] == UNUSED).all()), "scales of other heads were written"
    for cache in caches:
        cache.assert_around()
    for x in back or ():
        assert x.dtype == torch.float16 and x.is_contiguous()
    return Left(
        (bytes_of(codes[0]), bytes_of(codes[1])),
        scales_HS.cpu().numpy().view(np.uint32),
        got.stats.tolist(),
        back and (back[0].cpu().numpy(), back[1].cpu().numpy()),
    )


def want(made: Case) -> Left:
    """What any store must leave."""
    T, H, _ = made.k_THD.shape
    slots, stats = made.slots_T.tolist(), list(made.before)
    codes, backs, scales = [], [], np.ones((2, T, H), np.float32)
    for side, x_THD in enumerate((made.k_THD, made.v_THD)):
        cache = np.zeros((SLOTS + T, *x_THD.shape[1:]), np.int8)
        back = np.zeros(x_THD.shape, np.float16)
        for t, slot in enumerate(slots):
            for h in range(H):
                x_D = x_THD[t, h].float().numpy()
                stored_D = x_D if side else rotated(x_D)
                cache[slot, h], scale = encode(stored_D)
                scales[side, t, h] = scale
                with np.errstate(invalid="ignore"):
                    exact = cache[slot, h].astype(np.float64) * float(scale)
                back[t, h] = exact
                assert np.isnan(scale) or (back[t, h] == exact).all(), "FP16 does not hold it"
                if slot == 0:
                    continue
                stats[1 + side] += sum(abs(float(x)) > 127 * 512 for x in stored_D)
                for x in x_D.tolist():
                    if math.isfinite(x):
                        stats[3 + side] = max(stats[3 + side], bits_of(x))
        codes.append(cache.view(np.uint8))
        backs.append(back)
    words = np.full((H, SLOTS + T), UNUSED, np.uint32)
    for t, slot in enumerate(slots):
        for h in range(H):
            words[h, slot] = word(scales[0, t, h], scales[1, t, h])
    stats[0] += sum(slot != 0 for slot in slots)
    return Left((codes[0], codes[1]), words, stats, (backs[0], backs[1]))
