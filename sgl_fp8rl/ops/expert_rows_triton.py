"""Rows sorted by expert, and summed again, on the GPU: one launch each.

The bytes are those of ``expert_rows.py``, except for the order in which a token's rows are summed.
Nothing is synchronized, and no kernel depends on the number of tokens.
"""

import torch
import triton
import triton.language as tl

from sgl_fp8rl.ops.activation import Quantized, empty_quantized
from sgl_fp8rl.ops.expert_rows import Places, SortedRows, check_sort
from sgl_fp8rl.ops.reference import BLOCK

_PLACES = tl.constexpr(4)
"""Places per program: enough bytes in flight, and a divisor of 128."""
_WARPS = 4


def sort_rows(tokens: Quantized, places: Places, T: int) -> SortedRows:
    """``expert_rows.sort_rows`` on the current stream; there is what it takes and raises."""
    P = check_sort(tokens, places)
    codes_MK, scales_Mk = tokens
    M, K = codes_MK.shape
    rows = empty_quantized(P, K, codes_MK.device)
    expert_P = places.expert_B.new_empty(P)
    place_R = places.row_P.new_empty(M * T)
    with torch.cuda.device_of(codes_MK):  # a kernel starts on the current device
        _sort_rows[(P // _PLACES.value,)](
            codes_MK.view(torch.uint8),
            scales_Mk,
            rows.codes_MK.view(torch.uint8),
            rows.scales_Mk,
            *places,
            expert_P,
            place_R,
            M * T,
            P,
            T=T,
            K=K,
            WIDTH=triton.next_power_of_2(K),
            GROUPS=triton.next_power_of_2(K // BLOCK),
            num_warps=_WARPS,
        )
    return SortedRows(rows, expert_P, place_R)


def sum_rows(
    y_PH: torch.Tensor,
    place_R: torch.Tensor,
    weight_MT: torch.Tensor,
    factor: float,
    out_MH: torch.Tensor,
) -> torch.Tensor:
    """``expert_rows.sum_rows`` on the current stream; there is what it takes."""
    M, T = weight_MT.shape
    H = y_PH.shape[1]
    with torch.cuda.device_of(y_PH):  # a kernel starts on the current device
        _sum_rows[(M,)](
            y_PH,
            place_R,
            weight_MT,
            out_MH,
            factor,
            T=T,
            H=H,
            WIDTH=triton.next_power_of_2(H),
            num_warps=_WARPS,
        )
    return out_MH


_SIZE = tl.constexpr(BLOCK)


@triton.jit(do_not_specialize=["R", "P"])
def _sort_rows(
    codes: tl.tensor,
    scales: tl.tensor,
    sorted_codes: tl.tensor,
    sorted_scales: tl.tensor,
    row_of_place: tl.tensor,
    expert_of_block: tl.tensor,
    used: tl.tensor,
    expert_of_place: tl.tensor,
    place_of_row: tl.tensor,
    R: tl.tensor,
    P: tl.tensor,
    T: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
) -> None:
    """One program fills ``_PLACES`` places, all in use or none."""
    place = tl.program_id(0) * _PLACES + tl.arange(0, _PLACES)
    if tl.program_id(0) * _PLACES >= tl.load(used):
        tl.store(expert_of_place + place, tl.full((_PLACES,), -1, tl.int32))
    else:
        expert = tl.load(expert_of_block + tl.program_id(0) * _PLACES // _SIZE)
        tl.store(expert_of_place + place, tl.zeros((_PLACES,), tl.int32) + expert)
        row = tl.load(row_of_place + place)
        is_row = row < R
        tl.store(place_of_row + row, tl.where(expert >= 0, place, -1), mask=is_row)
        token = (row // T).to(tl.int64)[:, None]
        col = tl.arange(0, WIDTH)[None, :]
        inside = is_row[:, None] & (col < K)
        values = tl.load(codes + token * K + col, mask=inside)
        tl.store(sorted_codes + place.to(tl.int64)[:, None] * K + col, values, mask=inside)
        group = tl.arange(0, GROUPS)[None, :]
        inside = is_row[:, None] & (group < K // _SIZE)
        factors = tl.load(scales + token * (K // _SIZE) + group, mask=inside)
        tl.store(sorted_scales + group.to(tl.int64) * P + place[:, None], factors, mask=inside)


@triton.jit
def _sum_rows(
    y: tl.tensor,
    place_of_row: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    factor: tl.tensor,
    T: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """One program sums the rows of one token."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, WIDTH)
    inside = col < H
    total = tl.zeros((WIDTH,), tl.float32)
    for t in tl.static_range(T):
        place = tl.load(place_of_row + token * T + t).to(tl.int64)
        weight = tl.load(weights + token * T + t)
        row = tl.load(y + place * H + col, mask=inside & (place >= 0), other=0.0)
        total += row.to(tl.float32) * weight
    tl.store(out + token * H + col, (total * factor).to(tl.bfloat16), mask=inside)
