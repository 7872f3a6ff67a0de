"""Attention of a decode step over a paged KV cache of 8-bit codes: arguments and reference.

Shape suffixes: B sequences, N query tokens of all of them, Q query heads, H KV heads, G query heads
of a KV head, S slots of the cache, T tokens of a sequence, P pages of a sequence, D head dim.
"""

from dataclasses import dataclass

import torch

SPLIT = 1024
"""Tokens of a sequence that ``paged_decode.cu`` sums apart; counted from its start."""


@dataclass(frozen=True)
class Codes:
    """The codes of K and V, ``[S, H, D]``, and what they are multiples of."""

    k_SHD: torch.Tensor
    """E4M3, or INT8."""
    v_SHD: torch.Tensor
    k_scale_H: torch.Tensor | None = None
    """E4M3: FP32, one for each KV head."""
    v_scale_H: torch.Tensor | None = None
    token_scales_HS: torch.Tensor | None = None
    """INT8: of K and V of each token, ``pack_token_scales``."""

    def of_heads(self, heads: slice) -> "Codes":
        """Those of some KV heads: views."""
        k_scale_H, v_scale_H, token_scales_HS = (
            None if x_H is None else x_H[heads]
            for x_H in (self.k_scale_H, self.v_scale_H, self.token_scales_HS)
        )
        k_SHD, v_SHD = self.k_SHD[:, heads], self.v_SHD[:, heads]
        return Codes(k_SHD, v_SHD, k_scale_H, v_scale_H, token_scales_HS)

    def values(self, slots_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of these slots, ``[T, H, D]``."""
        # as bytes: not every torch version and device can index FP8
        k_THD, v_THD = (
            x_SHD.view(torch.uint8)[slots_T].view(x_SHD.dtype).float()
            for x_SHD in (self.k_SHD, self.v_SHD)
        )
        if self.token_scales_HS is None:
            assert self.k_scale_H is not None and self.v_scale_H is not None
            k_scale, v_scale = self.k_scale_H[:, None], self.v_scale_H[:, None]
        else:
            bits_TH1 = self.token_scales_HS[:, slots_T].t()[..., None]
            k_scale, v_scale = (x.view(torch.float32) for x in (bits_TH1 << 16, bits_TH1 & -65536))
        return k_THD * k_scale, v_THD * v_scale


@dataclass(frozen=True)
class Pages:
    """Where the tokens of each sequence lie."""

    table_BP: torch.Tensor
    """int32: the pages of each sequence, in order."""
    size: int
    """Slots of a page, a power of two."""
    lengths_B: torch.Tensor
    """int32: tokens of each sequence, those of q among them."""

    def slots(self, sequence: int) -> torch.Tensor:
        """The slots of a sequence's tokens, int64 ``[T]``."""
        at_T = torch.arange(int(self.lengths_B[sequence]), device=self.table_BP.device)
        return self.table_BP[sequence].long()[at_T // self.size] * self.size + at_T % self.size


def pack_token_scales(k_scale_SH: torch.Tensor, v_scale_SH: torch.Tensor) -> torch.Tensor:
    """INT8's scales, int32 ``[H, S]``: BF16 of K in the low half, of V in the high half.

    Args:
        k_scale_SH: FP32 that BF16 holds exactly, positive or 0.
    """
    k_bits, v_bits = k_scale_SH.view(torch.int32) >> 16, v_scale_SH.view(torch.int32)
    return (k_bits & 0xFFFF | v_bits & -65536).t().contiguous()


def attend(
    q_NQD: torch.Tensor,
    codes: Codes,
    pages: Pages,
    scale: float,
    window: int | None = None,
    logit_cap: float = 0.0,
    sinks_Q: torch.Tensor | None = None,
) -> torch.Tensor:
    """``softmax(scale * q k^T) v`` of the last tokens of each sequence, FP32 ``[N, Q, D]``.

    The reference of ``paged_decode_cuda.attend``, which rounds P to FP16 and out to BF16.

    Args:
        q_NQD: the same number of tokens for each sequence. Each attends to those up to itself.
        window: and to no more than so many before it; None for all.
        logit_cap: scores become ``cap * tanh(score / cap)``; 0 for none.
        sinks_Q: scores of a token more that every query sees, without a V.
    """
    out_NQD = torch.empty(q_NQD.shape, dtype=torch.float32, device=q_NQD.device)
    queries = len(q_NQD) // len(pages.lengths_B)
    for sequence in range(len(pages.lengths_B)):
        values = codes.values(pages.slots(sequence))
        rows = slice(sequence * queries, (sequence + 1) * queries)
        out_NQD[rows] = attend_last(q_NQD[rows], *values, scale, window, logit_cap, sinks_Q)
    return out_NQD


def attend_last(
    q_NQD: torch.Tensor,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    scale: float,
    window: int | None = None,
    logit_cap: float = 0.0,
    sinks_Q: torch.Tensor | None = None,
) -> torch.Tensor:
    """``attend`` of the last N tokens of one sequence over its FP32 K and V, FP32 ``[N, Q, D]``."""
    last_N = torch.arange(len(k_THD) - len(q_NQD), len(k_THD), device=q_NQD.device)
    at_T = torch.arange(len(k_THD), device=q_NQD.device)
    hidden_NT = at_T > last_N[:, None]
    if window is not None:
        hidden_NT |= at_T < last_N[:, None] - window
    q_NHGD = q_NQD.float().unflatten(1, (k_THD.shape[1], -1))
    scores = torch.einsum("nhgd,thd->nhgt", q_NHGD, k_THD) * scale
    if logit_cap:
        scores = logit_cap * (scores / logit_cap).tanh()
    scores.masked_fill_(hidden_NT[:, None, None], -torch.inf)
    if sinks_Q is not None:
        sinks_HG1 = sinks_Q.float().view(*scores.shape[1:3], 1)
        scores = torch.cat([scores, sinks_HG1.expand(len(q_NQD), -1, -1, -1)], -1)
    weights = scores.softmax(-1)[..., : len(k_THD)]
    return torch.einsum("nhgt,thd->nhgd", weights, v_THD).flatten(1, 2)
