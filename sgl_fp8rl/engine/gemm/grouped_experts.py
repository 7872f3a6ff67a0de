"""Experts of large batches with DeepGEMM's grouped GEMM, over rows sorted by expert.

SGLang's Triton kernel gathers rows while it multiplies, which suits a decode step bound by reading
weights. If arithmetic is the bound, DeepGEMM gains more than the copy costs. SGLang has such a
runner too, with separate launches for sort and scales, and for all batches or none.

Shape suffixes as in ``ops.expert_rows``; E experts, I channels of each half of gate_up.
"""

from typing import Any

import torch

from sgl_fp8rl.engine import compat
from sgl_fp8rl.ops.activation import Quantized, empty_quantized
from sgl_fp8rl.ops.expert_rows import Places
from sgl_fp8rl.ops.reference import BLOCK

ROWS_OF_EXPERT = 256
"""Average rows per expert from which DeepGEMM runs; with 128, both take equally long on an H200."""


def is_grouped(layer: Any, M: int, T: int) -> bool:
    """Whether M tokens of ``layer`` run here."""
    return bool(layer.quant_method.is_compiled) and least_tokens(len(layer.w13_weight), T) <= M


def grouped_experts(
    layer: Any,
    tokens: Quantized,
    weights_MT: torch.Tensor,
    ids_MT: torch.Tensor,
    factor: float,
    out_MH: torch.Tensor,
) -> torch.Tensor:
    """``factor`` times the weighted sum of each token's experts, into ``out_MH``.

    Args:
        layer: one whose kernels ``compile_grouped`` has compiled.
        tokens: codes ``[M, H]``, scales by row.
        weights_MT: FP32.
        ids_MT: int32.
    """
    from sgl_fp8rl.ops.activation_triton import silu_mul_codes  # Triton, and a GPU
    from sgl_fp8rl.ops.expert_rows_triton import sort_rows, sum_rows

    w13, w2 = layer.w13_weight, layer.w2_weight
    places = Places(*compat.moe_align_block_size(ids_MT, BLOCK, len(w13)))
    rows, expert_P, place_R = sort_rows(tokens, places, ids_MT.shape[1])
    gate_up_P2I = _grouped_gemm(rows, w13, layer.w13_weight_scale_inv, expert_P)
    del rows  # free a prefill's memory for what follows
    power_of_two = layer.quant_method.format.power_of_two_scales
    hidden = silu_mul_codes(gate_up_P2I, power_of_two=power_of_two)
    del gate_up_P2I
    down_PH = _grouped_gemm(hidden, w2, layer.w2_weight_scale_inv, expert_P)
    return sum_rows(down_PH, place_R, weights_MT, factor, out_MH)


def compile_grouped(layer: Any, T: int, largest: int) -> None:
    """Compile the kernels for batches up to ``largest`` tokens, if those are large enough.

    DeepGEMM selects its tile by the number of places that SGLang allocates, so each number runs
    once with no place in use, so that all blocks are skipped. The largest runs first, because torch
    can reuse its memory for the smaller ones. The Triton kernels around the GEMMs compile when
    ``kernel_checks`` runs a batch.
    """
    E = len(layer.w13_weight)
    least = least_tokens(E, T)
    if largest < least:
        return
    # one block more: newer versions of SGLang round the number up to a multiple of 4 first
    rooms = range(_places(least, T, E), _places(largest, T, E) + BLOCK + 1, BLOCK)
    device = layer.w13_weight.device
    for weight, scales in (
        (layer.w13_weight, layer.w13_weight_scale_inv),
        (layer.w2_weight, layer.w2_weight_scale_inv),
    ):
        for P in reversed(rooms):
            none_P = torch.full((P,), -1, dtype=torch.int32, device=device)
            _grouped_gemm(empty_quantized(P, weight.shape[2], device), weight, scales, none_P)
    torch.cuda.empty_cache()


def least_tokens(E: int, T: int) -> int:
    """From how many tokens on experts run here."""
    return -(-ROWS_OF_EXPERT * E // T)


def _places(M: int, T: int, E: int) -> int:
    # SGLang's own bound, rounded down to whole blocks
    return (M * T + (E + 1) * (BLOCK - 1)) // BLOCK * BLOCK


def _grouped_gemm(
    rows: Quantized, weight_ENK: torch.Tensor, scales_Enk: torch.Tensor, expert_P: torch.Tensor
) -> torch.Tensor:
    import deep_gemm  # type: ignore[import-untyped, import-not-found, unused-ignore]

    y_PN = weight_ENK.new_empty((len(expert_P), weight_ENK.shape[1]), dtype=torch.bfloat16)
    # it wants plain tuples
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        (rows.codes_MK, rows.scales_Mk), (weight_ENK, scales_Enk), y_PN, expert_P
    )
    return y_PN
