"""Rows sorted by expert for a grouped GEMM, in plain torch: the reference for
``expert_rows_triton.py``.

Each expert's rows are contiguous and start at a multiple of 128, as DeepGEMM's grouped GEMM needs.
Shape suffixes: M tokens, T experts per token, R = M * T rows, one for each token and expert; K and
H channels, k = K in groups of 128; P places, some of which are empty in an expert's last block.
"""

from typing import NamedTuple

import torch

from sgl_fp8rl.ops.activation import Quantized, empty_quantized
from sgl_fp8rl.ops.reference import BLOCK


class Places(NamedTuple):
    """The result of SGLang's ``moe_align_block_size`` for blocks of 128."""

    row_P: torch.Tensor
    """int32: the row at each place, R or more if empty; undefined after ``used``."""
    expert_B: torch.Tensor
    """int32: the expert of each block of 128 places; -1 for rows without one."""
    used_1: torch.Tensor
    """int32: the number of places in use, in whole blocks."""


class SortedRows(NamedTuple):
    """Rows at their places; empty places are undefined."""

    rows: Quantized
    """Codes ``[P, K]``, scales in DeepGEMM's layout."""
    expert_P: torch.Tensor
    """int32: expert of each place; -1 after those in use, which a grouped GEMM skips."""
    place_R: torch.Tensor
    """int32: the place of each row; -1 for rows without an expert, such as padding."""


def sort_rows(tokens: Quantized, places: Places, T: int) -> SortedRows:
    """Copy each token to the places of its T rows.

    Args:
        tokens: codes ``[M, K]``, scales by row.

    Raises:
        ValueError: the scales of a token are not contiguous.
    """
    P = check_sort(tokens, places)
    codes_MK, scales_Mk = tokens
    M, K = codes_MK.shape
    row_P = places.row_P[:P].long()
    is_used_P = torch.arange(P) < places.used_1
    place_I = (is_used_P & (row_P < M * T)).nonzero().squeeze(1)
    rows = empty_quantized(P, K, codes_MK.device)
    token_I = row_P[place_I] // T
    rows.codes_MK.view(torch.uint8)[place_I] = codes_MK.view(torch.uint8)[token_I]
    rows.scales_Mk[place_I] = scales_Mk[token_I]
    expert_P = places.expert_B[: P // BLOCK].repeat_interleave(BLOCK)
    place_R = torch.empty(M * T, dtype=torch.int32)
    has_expert_I = expert_P[place_I] >= 0
    place_R[row_P[place_I]] = torch.where(has_expert_I, place_I.int(), -1)
    return SortedRows(rows, torch.where(is_used_P, expert_P, -1), place_R)


def sum_rows(
    y_PH: torch.Tensor,
    place_R: torch.Tensor,
    weight_MT: torch.Tensor,
    factor: float,
    out_MH: torch.Tensor,
) -> torch.Tensor:
    """``factor`` times the weighted sum of each token's rows: in FP32, rounded once.

    Args:
        y_PH: BF16.
        weight_MT: FP32.
        out_MH: BF16, contiguous; written to and returned.
    """
    M, T = weight_MT.shape
    y_RH = y_PH[place_R.long()].float().masked_fill((place_R < 0).unsqueeze(1), 0.0)
    y_MTH = y_RH.view(M, T, -1)
    return out_MH.copy_((y_MTH * weight_MT.unsqueeze(-1)).sum(1) * factor)


def check_sort(tokens: Quantized, places: Places) -> int:
    """The maximum number of places, in whole blocks; ValueError if rows are not contiguous."""
    if not (tokens.is_by_row and tokens.codes_MK.is_contiguous()):
        raise ValueError(
            f"codes and scales have strides {tokens.codes_MK.stride()} and "
            f"{tokens.scales_Mk.stride()}, not contiguous rows; quantize with by_row=True"
        )
    return len(places.row_P) // BLOCK * BLOCK
