"""Codes of 8 bits, and attention as FP8 tensor cores of Hopper multiply, in plain torch.

A product on them (wgmma, E4M3) adds 32 products to an accumulator at a time: all 33 are cut to
multiples of 2**-13 of the largest one's power of two, toward zero, and then summed. The sum keeps
so 13 bits behind the first. Shape suffixes: H heads, M rows, K terms of a sum, N columns, Q
queries, T tokens, D head dim. All tensors are FP32.
"""

from collections.abc import Callable

import torch

from sgl_fp8rl.ops.kv_int8 import rotate, token_codes
from sgl_fp8rl.ops.reference import FP8_DTYPE, FP8_MAX

BITS = 13
"""Behind the first bit of the largest term."""
STEP = 32
"""Terms that one instruction adds."""
TILE = 128
"""Tokens between two looks at the largest score, as XQA and FA3 take them."""
ROWS = 8
"""Queries at a time, so that a step's products stay in a core's cache."""
BLOCK = 256
"""Queries at a time, where products are summed in FP32."""
MARGIN = 2.0
LEAST = 2.0**-100
SINKS = 4
"""First tokens, which no offset is measured on."""
Add = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From a [H, M, K], b [H, K, N] and a sum [H, M, N] to ``sum + a @ b``."""


# ---- codes ---------------------------------------------------------------------------------------

Codes = Callable[[torch.Tensor], torch.Tensor]
"""From values [H, T, D] to what their codes stand for."""


def e4m3(x: torch.Tensor, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
    """Saturated."""
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE).float() * scale


def by_layer(x: torch.Tensor) -> torch.Tensor:
    """E4M3 with one scale, which leaves a margin."""
    return e4m3(x, x.abs().amax() * (MARGIN / FP8_MAX))


def by_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The same, the scale rounded up to a power of two."""
    return e4m3(x, torch.exp2((x.abs().amax() * (MARGIN / FP8_MAX)).log2().ceil()))


def by_token(x: torch.Tensor) -> torch.Tensor:
    """E4M3 with a scale for each token and head."""
    return e4m3(x, x.abs().amax(-1, keepdim=True).clamp_min(LEAST) / FP8_MAX)


def int8(x: torch.Tensor) -> torch.Tensor:
    """INT8 with a scale for each token and head, as the engine's cache has it."""
    codes, scale_HT = token_codes(x, rotated=False)
    return codes * scale_HT[..., None]


def offset(code: Codes) -> Codes:
    """The same of what is left behind a head's mean over tokens."""

    def coded(x: torch.Tensor) -> torch.Tensor:
        mean = x[:, SINKS:].mean(1, keepdim=True)
        return code(x - mean) + mean

    return coded


def rotated(code: Codes) -> Codes:
    """The same of values times a Hadamard matrix, which is its own inverse."""
    return lambda x: rotate(code(rotate(x)))


def fp16(x: torch.Tensor) -> torch.Tensor:
    """Rounded to FP16."""
    return x.half().float()


# ---- attention on FP8 tensor cores ---------------------------------------------------------------


def short_sum(a_HMK: torch.Tensor, b_HKN: torch.Tensor, sum_HMN: torch.Tensor) -> torch.Tensor:
    """``sum + a @ b`` as wgmma adds it."""
    for k in range(0, a_HMK.shape[-1], STEP):
        a, b = a_HMK[..., k : k + STEP, None], b_HKN[..., None, k : k + STEP, :]
        terms_HMKN = a * b
        largest = torch.maximum(terms_HMKN.amax(-2), -terms_HMKN.amin(-2))
        largest = torch.maximum(largest, sum_HMN.abs())
        unit = power_of_two_below(largest) * 2.0**-BITS
        terms_HMKN.mul_((1 / unit)[..., None, :]).trunc_()
        sum_HMN = cut((terms_HMKN.sum(-2) + (sum_HMN / unit).trunc()) * unit)
    return sum_HMN


def full_sum(a_HMK: torch.Tensor, b_HKN: torch.Tensor, sum_HMN: torch.Tensor) -> torch.Tensor:
    """``sum + a @ b`` in FP32."""
    return sum_HMN + a_HMK @ b_HKN


def cut(x: torch.Tensor) -> torch.Tensor:
    """Toward zero, to 13 bits behind the first."""
    return (x.view(torch.int32) & -(1 << (23 - BITS))).view(torch.float32)


def power_of_two_below(x: torch.Tensor) -> torch.Tensor:
    """The largest one that is at most x."""
    return (x.clamp_min(LEAST).view(torch.int32) & 0x7F800000).view(torch.float32)


def exact(q_HQD: torch.Tensor, k_HTD: torch.Tensor, v_HTD: torch.Tensor) -> torch.Tensor:
    """Attention of the queries at the first positions, scaled as in ``attend``: HQD."""
    parts = []
    for start in range(0, q_HQD.shape[1], BLOCK):
        q = q_HQD[:, start : start + BLOCK]
        end = start + q.shape[1]
        at_T = torch.arange(end, device=q.device)
        scores = (q @ k_HTD[:, :end].mT).masked_fill_(at_T > at_T[start:, None], -torch.inf)
        parts.append(scores.softmax(-1) @ v_HTD[:, :end])
    return torch.cat(parts, 1)


def attend(
    q_HQD: torch.Tensor,
    k_HTD: torch.Tensor,
    v_HTD: torch.Tensor,
    first: int,
    *,
    p_codes: Codes | None,
    add: Add,
) -> torch.Tensor:
    """Attention of the queries at positions ``first`` on, as XQA computes it: HQD.

    Args:
        q_HQD: scaled, so that its products with K are the scores.
        p_codes: rounds probabilities, the largest of which is 448.
        add: how both products are summed.
    """
    parts = []
    for start in range(0, q_HQD.shape[1], ROWS):
        q = q_HQD[:, start : start + ROWS]
        at_Q1 = torch.arange(first + start, first + start + q.shape[1], device=q.device)[:, None]
        top = q.new_full((*q.shape[:2], 1), -torch.inf)
        total, out = torch.zeros_like(top), torch.zeros_like(q)
        seen = first + start + q.shape[1]
        for begin in range(0, seen, TILE):
            k, v = (x[:, begin : min(begin + TILE, seen)] for x in (k_HTD, v_HTD))
            at_T = torch.arange(begin, begin + k.shape[1], device=q.device)
            scores = add(q, k.mT.contiguous(), q.new_zeros(*q.shape[:2], k.shape[1]))
            scores = scores.masked_fill(at_T > at_Q1, -torch.inf)
            old, top = top, torch.maximum(top, scores.amax(-1, keepdim=True))
            p = torch.exp(scores - top)
            kept = torch.exp(old - top)
            total = total * kept + p.sum(-1, keepdim=True)
            p = p * FP8_MAX
            out = add(p if p_codes is None else p_codes(p), v, out * kept)
        parts.append(out / (total * FP8_MAX))
    return torch.cat(parts, 1)
