"""Attention over a paged cache in float64, and inputs as models make them.

Shares no code with ``sgl_fp8rl.ops.paged_decode``: E4M3 is torch's own cast to float64, INT8's
scales are read from their bytes by NumPy, and pages are walked one by one. Shape suffixes as there.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from sgl_fp8rl.ops.paged_decode import Codes, Pages

Tensor = torch.Tensor
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """One step of attention. Real V has means: |mean| / std of SmolLM2-135M's channels is 0.22 in
    the median, above 0.3 in a third and up to 5.9."""

    lengths: tuple[int, ...]
    heads: int = 8
    group: int = 4
    dim: int = 128
    queries: int = 1
    page: int = 64
    mean: float = 0.3
    """Of V, in standard deviations."""
    softmax: str = "peaked"
    """Or "flat"; or "needle": one token at a tenth of the context has half of the weight."""
    int8: bool = False
    window: int | None = None
    cap: float = 0.0
    """Of logits, whose uncapped ones are normal and reach to some times as much; 0 for none."""
    sink: float | None = None
    """Mean of the query heads' sinks."""

    @property
    def name(self) -> str:
        many = f"{len(self.lengths)}x" if len(set(self.lengths)) == 1 else ""
        shape = f"{many}{max(self.lengths)}-h{self.heads}x{self.group}-d{self.dim}-q{self.queries}"
        kind = "int8" if self.int8 else "e4m3"
        window = "" if self.window is None else f"-w{self.window}"
        cap = f"-c{self.cap:g}" if self.cap else ""
        sink = "" if self.sink is None else f"-s{self.sink:g}"
        return f"{shape}-p{self.page}-{kind}-v{self.mean:g}-{self.softmax}{window}{cap}{sink}"


@dataclass(frozen=True)
class Step:
    """A case's tensors."""

    q_NQD: Tensor
    codes: Codes
    pages: Pages
    scale: float
    cap: float = 0.0
    sinks_Q: Tensor | None = None
    """BF16."""


def draw(case: Case, device: str, seed: int = 0) -> Step:
    """Shuffled pages, some of which belong to nobody and hold NaN codes where codes have them."""
    random = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, device=device)

    counts = [math.ceil(length / case.page) for length in case.lengths]
    order = torch.randperm(sum(counts) + 2, generator=random, device=device).int()
    table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32, device=device)
    for row, part in zip(table, order[: sum(counts)].split(counts), strict=True):
        row[: len(part)] = part
    slots = len(order) * case.page
    shape = slots, case.heads, case.dim
    q = normal(len(counts) * case.queries, case.heads * case.group, case.dim)
    k, v = normal(*shape) * 0.5 + normal(case.heads, case.dim), normal(*shape) + case.mean
    if case.softmax == "peaked":
        k *= 2
    elif case.softmax == "flat":
        q *= 0.05
    else:
        q = q * 0.1 + 1
        for row, length in zip(table.tolist(), case.lengths, strict=True):
            at = length // 10
            # its score is that of the sum of all others, and more than theirs by a logarithm
            k[row[at // case.page] * case.page + at % case.page] += math.log(length) / case.dim**0.5
            v[row[at // case.page] * case.page + at % case.page] += 4
    if case.cap:
        q *= case.cap / 2
    codes = _int8(k, v) if case.int8 else _e4m3(k, v, normal(2, case.heads).abs() * 0.01 + 0.01)
    if not case.int8:
        unused = (order[sum(counts) :, None] * case.page).long().flatten()
        codes.k_SHD.view(torch.uint8)[unused] = codes.v_SHD.view(torch.uint8)[unused] = 0x7F
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    q = q.half() if case.int8 else q.bfloat16()
    pages = Pages(table, case.page, lengths)
    sinks = None if case.sink is None else (normal(q.shape[1]) + case.sink).bfloat16()
    return Step(q, codes, pages, case.dim**-0.5, case.cap, sinks)


def with_powers_of_two(step: Step) -> Step:
    """As engines have scales by default: others round values in BF16."""
    codes = step.codes
    if codes.k_scale_H is None or codes.v_scale_H is None:
        return step
    k_scale_H, v_scale_H = (x_H.log2().ceil().exp2() for x_H in (codes.k_scale_H, codes.v_scale_H))
    return replace(step, codes=replace(codes, k_scale_H=k_scale_H, v_scale_H=v_scale_H))


def exact(step: Step, window: int | None = None) -> Tensor:
    """float64 ``[N, Q, D]``."""
    codes, pages = step.codes, step.pages
    queries = len(step.q_NQD) // len(pages.lengths_B)
    heads = codes.k_SHD.shape[1]
    out = torch.empty(step.q_NQD.shape, dtype=torch.float64, device=step.q_NQD.device)
    for sequence, length in enumerate(pages.lengths_B.tolist()):
        full, rest = divmod(length, pages.size)
        parts = [range(p * pages.size, (p + 1) * pages.size) for p in _row(pages, sequence, full)]
        if rest:
            start = _row(pages, sequence, full + 1)[-1] * pages.size
            parts.append(range(start, start + rest))
        slots = torch.tensor([slot for part in parts for slot in part], device=out.device)
        k, v = (side[slots] for side in _values(codes, slots))
        for query in range(queries):
            end = length - (queries - 1 - query)
            begin = 0 if window is None else max(0, end - 1 - window)
            row = step.q_NQD[sequence * queries + query].double().view(heads, -1, k.shape[2])
            scores = torch.matmul(row, k[begin:end].permute(1, 2, 0)) * step.scale
            if step.cap:
                scores = step.cap * torch.tanh(scores / step.cap)
            top = scores.amax(-1, keepdim=True)
            weights = torch.exp(scores - top)
            total = weights.sum(-1, keepdim=True)
            if step.sinks_Q is not None:
                total += torch.exp(step.sinks_Q.double().view(heads, -1, 1) - top)
            weights /= total
            mixed = torch.matmul(weights, v[begin:end].transpose(0, 1))
            out[sequence * queries + query] = mixed.reshape(out.shape[1:])
    return out


def errors(out: Tensor, exact_NQD: Tensor) -> tuple[float, float]:
    """Relative L2 error, and the signed bias: positive where outputs are too large."""
    difference = out.double().view_as(exact_NQD) - exact_NQD
    bias = (difference * exact_NQD.sign()).mean() / exact_NQD.abs().mean()
    return float(difference.norm() / exact_NQD.norm()), float(bias)


def _row(pages: Pages, sequence: int, count: int) -> list[int]:
    return pages.table_BP[sequence, :count].tolist()


def _values(codes: Codes, slots: Tensor) -> tuple[Tensor, Tensor]:
    """All of K and V in float64; only the rows of ``slots`` are meant."""
    sides = codes.k_SHD.double(), codes.v_SHD.double()
    if codes.token_scales_HS is None:
        assert codes.k_scale_H is not None and codes.v_scale_H is not None
        scales = codes.k_scale_H.double()[:, None], codes.v_scale_H.double()[:, None]
    else:
        raw = codes.token_scales_HS.cpu().numpy().view(np.uint16).reshape(*sides[0].shape[1::-1], 2)
        wide = (raw.astype(np.uint32) << 16).view(np.float32)
        k, v = (torch.from_numpy(wide[..., i].T.copy()).to(slots.device).double() for i in (0, 1))
        scales = k[..., None], v[..., None]
    return sides[0] * scales[0], sides[1] * scales[1]


def _e4m3(k: Tensor, v: Tensor, scales_2H: Tensor) -> Codes:
    k_scale, v_scale = scales_2H.contiguous()
    parts = ((x / s[:, None]).clamp(-448, 448).to(FP8) for x, s in ((k, k_scale), (v, v_scale)))
    return Codes(*parts, k_scale.contiguous(), v_scale.contiguous())


def _int8(k: Tensor, v: Tensor) -> Codes:
    """A scale for each token and head, rounded up to BF16."""
    codes, bits = [], []
    for side in (k, v):
        top = (side.abs().amax(-1) / 127).contiguous()
        up = ((top.view(torch.int32) + 0xFFFF) >> 16) << 16
        codes.append((side / up.view(torch.float32)[..., None]).round().to(torch.int8))
        bits.append(up)
    packed = (bits[0] >> 16 & 0xFFFF) | bits[1]
    return Codes(codes[0], codes[1], token_scales_HS=packed.t().contiguous())
