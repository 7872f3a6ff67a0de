"""QK-norm, rotary embedding and 8-bit store in float64 NumPy, and cases to hold ``norm_rope_store``
against.

The oracle shares no code with ``sgl_fp8rl.ops``: it walks tokens and heads in plain loops,
rounds to BF16 by ``frexp`` and stores by ``tests.kv_oracle`` or ``tests.kv_int8_oracle``. It rounds
only where values become BF16, so an implementation that also rounds to FP32 agrees to the last bit
where FP32 is exact (``exact``), and but for rare neighbours elsewhere (``usual``).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_fp8rl.ops.kv import Cache
from sgl_fp8rl.ops.qk_rope import Norms
from tests import kv_int8_oracle, kv_oracle, oracle
from tests.kv_oracle import SLOTS, Codes

Tensor = torch.Tensor
F64 = NDArray[np.float64]
BF16 = torch.bfloat16
Left = tuple[F64, Codes, Codes, list[int], NDArray[Any]]
Step = Callable[[Tensor, Tensor, Tensor, Norms | None, Tensor, Cache], Tensor]
"""``norm_rope_store`` of the reference or of the kernel."""

RARE = 2e-4
"""Share of elements that may be another BF16 value, or have another code. Healthy: 8e-5 (one code
of 12288); a norm that is not rounded before the rotation makes 0.3 of q and 0.03 of K's codes."""
Q_STEP, CODE_STEP = 2.0**-7, 2.0**-3
"""By how much those may differ, in terms of the largest of their head: one step of its format."""


def to_bf16(x: F64) -> F64:
    """The nearest of 8 significant bits, ties to even; no denormals here."""
    mantissa, exponent = np.frexp(x)
    return np.asarray(np.ldexp(np.rint(mantissa * 256), exponent - 8))


def turned(x_D: F64, cos_sin_D: F64, weight_D: F64 | None, eps: float) -> F64:
    """One head, normed and rotated."""
    if weight_D is not None:
        x_D = to_bf16(x_D / np.sqrt(np.mean(x_D * x_D) + eps) * weight_D)
    half = len(x_D) // 2
    out = np.empty_like(x_D)
    for i in range(half):
        cos, sin, x, y = cos_sin_D[i], cos_sin_D[half + i], x_D[i], x_D[half + i]
        out[i], out[half + i] = x * cos - y * sin, y * cos + x * sin
    return to_bf16(out)


@dataclass
class Got:
    """The arguments of a call, and after it what it left."""

    qkv: Tensor
    positions: Tensor
    cos_sin: Tensor
    norms: Norms | None
    slots: Tensor
    k_cache: kv_oracle.Cache
    v_cache: kv_oracle.Cache
    cache: Cache
    q: Tensor

    def run(self, step: Step) -> "Got":
        """Call it; returns self. The projection must stay what it was."""
        before = self.qkv.view(torch.int16).clone()
        self.q = step(self.qkv, self.positions, self.cos_sin, self.norms, self.slots, self.cache)
        assert torch.equal(self.qkv.view(torch.int16), before), "the projection was written to"
        is_int8 = self.cache.token_scales_HS is not None
        assert self.q.dtype == (torch.float16 if is_int8 else BF16) and self.q.is_contiguous()
        for cache in (self.k_cache, self.v_cache):
            cache.assert_around()
        return self

    def left(self) -> Left:
        """q, the codes of K and of V, the statistics, and the scales of INT8."""
        codes = [kv_oracle.bytes_of(cache.box) for cache in (self.k_cache, self.v_cache)]
        q_TND = self.q.unflatten(1, (-1, self.k_cache.shape[2])).double().cpu().numpy()
        scales = self.cache.token_scales_HS
        words = np.zeros(0) if scales is None else scales.cpu().numpy().view(np.uint32)
        return q_TND, codes[0], codes[1], self.cache.stats_C.tolist(), words


@dataclass
class Case:
    """What one call takes, on the CPU."""

    qkv_THD: Tensor
    """Heads of q, K and V."""
    positions_T: Tensor
    cos_sin_PD: Tensor
    norms: Norms | None
    slots_T: Tensor
    scale_2H: Tensor
    gap: int = 0
    int8: bool = False

    def on(self, device: str) -> Got:
        """Tensors as an engine has them; tokens of the projection and heads of the cache lie
        ``gap`` elements apart."""
        T, heads, D = self.qkv_THD.shape
        H = self.scale_2H.shape[1]
        wide = torch.zeros(T, heads * D + self.gap, dtype=BF16, device=device)
        qkv = wide[:, : heads * D]
        qkv.copy_(self.qkv_THD.flatten(1))
        k, v = (kv_oracle.Cache((T + SLOTS, H, D), self.gap, device) for _ in range(2))
        stats = torch.tensor([5, 1, 2, 0, 0], device=device)
        if self.int8:
            scales_HS = torch.zeros(H, T + SLOTS, dtype=torch.int32, device=device)
            boxes = k.box.view(torch.int8), v.box.view(torch.int8)
            cache = Cache(*boxes, token_scales_HS=scales_HS, stats_C=stats)
        else:
            scale_2H = self.scale_2H.to(device)
            cache = Cache(k.box, v.box, scale_2H[0], scale_2H[1], stats_C=stats)
        norms = self.norms and replace(
            self.norms, q_D=self.norms.q_D.to(device), k_D=self.norms.k_D.to(device)
        )
        moved = [x.to(device) for x in (self.positions_T, self.cos_sin_PD, self.slots_T)]
        return Got(qkv, moved[0], moved[1], norms, moved[2], k, v, cache, qkv)

    def want(self) -> Left:
        """What ``Got.left`` must be, by the oracle."""
        H = self.scale_2H.shape[1]
        N = self.qkv_THD.shape[1] - 2 * H
        x = self.qkv_THD.double().numpy()
        out = x.copy()
        for t, position in enumerate(self.positions_T.tolist()):
            cos_sin_D = self.cos_sin_PD[position].double().numpy()
            for h in range(N + H):
                weight_D = None
                if self.norms is not None:
                    weight_D = (self.norms.q_D if h < N else self.norms.k_D).double().numpy()
                eps = 0.0 if self.norms is None else self.norms.eps
                out[t, h] = turned(x[t, h], cos_sin_D, weight_D, eps)
                if h < N and self.int8:
                    q_D = kv_int8_oracle.rotated(out[t, h].astype(np.float32))
                    out[t, h] = q_D.clip(-65504, 65504).astype(np.float16)
        k, v = (torch.from_numpy(out[:, at : at + H]).to(BF16) for at in (N, N + H))
        made = kv_oracle.Case(k, v, self.slots_T, self.scale_2H[0], self.scale_2H[1])
        if self.int8:
            left = kv_int8_oracle.want(made)
            words = np.where(left.scales_HS == kv_int8_oracle.UNUSED, 0, left.scales_HS)
            return out[:, :N], *left.codes, left.stats, words
        return out[:, :N], *made.want(), np.zeros(0)


def assert_equal(got: Left, want: Left) -> None:
    """To the last bit."""
    for name, mine, other in zip(("q", "codes of K", "codes of V"), got, want, strict=False):
        wrong = np.argwhere(np.asarray(mine) != np.asarray(other))
        assert not len(wrong), f"{len(wrong)} {name} differ, first at {wrong[0]}"
    assert got[3] == want[3], "statistics differ"
    assert np.array_equal(got[4], want[4]), "scales differ"


def assert_near(got: Left, want: Left) -> float:
    """Equal but for rare neighbours among q and K's codes; the share of those."""
    differ = []
    for name, mine, other, step in (
        ("q", got[0], want[0], Q_STEP),
        ("codes of K", oracle.decode(got[1]), oracle.decode(want[1]), CODE_STEP),
    ):
        largest = np.abs(other).max(-1, keepdims=True)
        assert (np.abs(mine - other) <= step * largest).all(), f"{name} differ by more than a step"
        differ.append(float((mine != other).sum() / max((other != 0).sum(), 1)))
        assert differ[-1] <= RARE, f"{differ[-1]:.2g} of {name} differ"
    assert np.array_equal(got[2], want[2]), "codes of V differ"
    assert got[3][0] == want[3][0] and got[3][2] == want[3][2] and got[3][4] == want[3][4]
    assert abs(got[3][1] - want[3][1]) <= RARE * got[1].size
    assert abs(got[3][3] - want[3][3]) <= 1 << 16, "K's largest differs by more than a step"
    return max(differ)


def _case(
    heads_THD: Tensor, cos_sin_PD: Tensor, norms: Norms | None, H: int, gap: int, seed: int
) -> Case:
    T = len(heads_THD)
    random = torch.Generator().manual_seed(seed)
    slots = torch.randperm(SLOTS + T - 1, generator=random)[:T] + 1
    if T > 2:
        slots[-1] = 0  # padding
        heads_THD[-1] = torch.tensor(3.0)
        heads_THD[-1, :, ::4] = -1
    scale_2H = torch.exp2(torch.rand(2, H, generator=random) * 6 - 8)
    positions_T = torch.randint(len(cos_sin_PD), (T,), generator=random)
    return Case(heads_THD, positions_T, cos_sin_PD, norms, slots, scale_2H, gap)


def exact(
    shape: tuple[int, int, int, int],
    *,
    normed: bool,
    rotary: torch.dtype = torch.float32,
    gap: int = 0,
    seed: int = 0,
) -> Case:
    """Numbers of few bits: FP32 holds all that is computed, roots of means are whole, and BF16
    rounds, often from ties. ``shape``: tokens, query heads, KV heads, head dim."""
    T, N, H, D = shape
    random = torch.Generator().manual_seed(seed)
    sign = torch.randint(2, (T, N + 2 * H, D), generator=random) * 2.0 - 1
    if normed:  # a quarter is 3, the rest 1: the mean of squares is 3, and eps makes it 4
        order = torch.rand(T, N + 2 * H, D, generator=random).argsort(-1)
        x = torch.where(order < D // 4, 3.0, 1.0) * sign
        weights = torch.randint(4, 16, (2, D), generator=random).to(BF16) / 8
        norms = Norms(weights[0], weights[1], 1.0)
    else:
        x = torch.randint(128, (T, N + 2 * H, D), generator=random) / 16 * sign
    cos_sin = torch.randint(-16, 17, (40, D), generator=random) / 16
    return _case(x.to(BF16), cos_sin.to(rotary), norms if normed else None, H, gap, seed)


def usual(shape: tuple[int, int, int, int], *, normed: bool, seed: int = 0) -> Case:
    """What a model has: normal values, cosines and sines."""
    T, N, H, D = shape
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(T, N + 2 * H, D, generator=random) * 4
    weights = (1 + torch.randn(2, D, generator=random) / 4).to(BF16)
    inverse = 1e6 ** -(torch.arange(0, D, 2) / D)
    angle = torch.arange(4096)[:, None] * inverse
    cos_sin = torch.cat([angle.cos(), angle.sin()], -1)
    norms = Norms(weights[0], weights[1], 1e-6) if normed else None
    return _case(x.to(BF16), cos_sin, norms, H, 0, seed)
