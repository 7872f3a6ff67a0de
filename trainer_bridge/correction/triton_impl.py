"""Correct a batch with two Triton kernels; ``torch_impl.py`` is the reference implementation.

Shapes: B sequences, T tokens of the longest response, G groups of tokens, R programs, K terms.
"""

from functools import lru_cache

import torch
import triton

from trainer_bridge.correction import packed_bounds, triton_rows, triton_tokens
from trainer_bridge.correction.config import LEVELS, REJECTIONS, CorrectionConfig
from trainer_bridge.correction.torch_impl import Corrected
from trainer_bridge.metrics.groups import POSITIONS, Groups
from trainer_bridge.metrics.histogram import BINS
from trainer_bridge.metrics.reducer import Reducer

BLOCK = 512  # tokens per iteration; fewer for shorter rows
ROW_WARPS, TOKEN_WARPS = 16, 4
COPIES = 16
"""Of the histogram: tokens on which the policies agree hit few bins, and atomics would contend."""
END = 2**31 - 1  # end of the last group of positions


def correct_rows(
    reducer: Reducer,
    trainer_BT: torch.Tensor,
    rollout_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    groups: Groups,
    config: CorrectionConfig,
) -> Corrected:
    """``torch_impl.correct_rows`` on the current stream, for a non-empty batch."""
    trainer_BT, rollout_BT, mask_BT = (
        tensor.detach().contiguous() for tensor in (trainer_BT, rollout_BT, mask_BT)
    )
    given = trainer_BT, rollout_BT, mask_BT.view(torch.uint8)
    device, (B, T) = mask_BT.device, mask_BT.shape
    found = Corrected.like(mask_BT)
    level = 0 if config.rollout_is is None else 1 + LEVELS.index(config.rollout_is)
    how = {"LEVEL": level, "IS_BAND": isinstance(config.rollout_is_threshold, tuple)}
    bounds = _bounds(tuple(packed_bounds.pack_bounds(config)), device)
    block = min(BLOCK, max(32, triton.next_power_of_2(T)))
    blocks = triton.cdiv(T, block)
    versions_BT = groups.versions_BT
    shown = [] if versions_BT is None else groups.versions
    G = len(POSITIONS) + len(shown)

    def doubles(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float64, device=device)

    sums_BS, maxima_BS = doubles(B, triton_rows.SUMS), doubles(B, triton_rows.MAXIMA)
    states_BS = doubles(B, triton_rows.STATES)
    sums_RGK = doubles(B * blocks, G, triton_tokens.TERMS).zero_()
    counts_CGN = torch.zeros(COPIES, G, BINS, dtype=torch.int32, device=device)
    starts = _starts(device)
    # copies to the GPU come before the kernels, which a later copy would wait for
    unread = states_BS.view(torch.int64)
    known_V = groups.versions_V if shown else unread
    versions_BT = unread if versions_BT is None else versions_BT.contiguous()
    with torch.cuda.device_of(mask_BT):  # Triton launches on the current device
        triton_rows.count_rows[(B,)](
            *given,
            bounds,
            sums_BS,
            maxima_BS,
            states_BS,
            T,
            BLOCK=block,
            num_warps=warps_of(ROW_WARPS, block),
            **how,
        )
        triton_tokens.count_tokens[(B, blocks)](
            *given,
            versions_BT,
            known_V,
            starts,
            bounds,
            states_BS,
            found.weights_BT,
            found.mask_BT.view(torch.uint8),
            found.old_logprobs_BT,
            sums_RGK,
            counts_CGN,
            T,
            len(shown),
            POSITIONS=len(POSITIONS),
            COPIES=COPIES,
            APPLIES=config.applies_weights,
            KEEPS_ROLLOUT=config.bypass_mode,
            BLOCK=block,
            num_warps=warps_of(TOKEN_WARPS, block),
            **how,
        )
    all_groups = 1 + len(POSITIONS) + len(groups.versions)
    reducer.sum("tokens", _chosen_terms(_with_whole(sums_RGK, all_groups), config))
    reducer.sum("histogram", _with_whole(counts_CGN, all_groups))
    _add_rows(reducer, sums_BS.sum(0), maxima_BS.amax(0), config)
    return found


def warps_of(most: int, block: int) -> int:
    """Warps of a kernel whose programs process ``block`` tokens per iteration."""
    return min(most, block // 32)


@lru_cache(maxsize=16)
def _bounds(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)


@lru_cache(maxsize=16)
def _starts(device: torch.device) -> torch.Tensor:
    """Starts of the groups of positions, and the end of the last."""
    return torch.tensor([*POSITIONS, END], dtype=torch.int32, device=device)


def _chosen_terms(sums_GK: torch.Tensor, config: CorrectionConfig) -> torch.Tensor:
    """The terms that ``torch_impl`` has: of the mismatch, then of ``config.means``."""
    mismatch = triton_tokens.TERMS - 3
    if config.rollout_is is not None:
        return sums_GK if config.rejects else sums_GK[:, : mismatch + 2]
    if config.rejects:
        return torch.cat([sums_GK[:, :mismatch], sums_GK[:, mismatch + 2 :]], 1)
    return sums_GK[:, :mismatch]


def _with_whole(parts_RGK: torch.Tensor, all_groups: int) -> torch.Tensor:
    """Float64 [all_groups, K], summed over R: the sum over all positions, then the groups, then
    zeros for versions that only other ranks have."""
    G, K = parts_RGK.shape[1:]
    found = torch.empty(all_groups, K, dtype=torch.float64, device=parts_RGK.device)
    torch.sum(parts_RGK, 0, dtype=torch.float64, out=found[1 : 1 + G])
    torch.sum(found[1 : 1 + len(POSITIONS)], 0, out=found[0])
    found[1 + G :] = 0
    return found


def _add_rows(
    reducer: Reducer, sums: torch.Tensor, maxima: torch.Tensor, config: CorrectionConfig
) -> None:
    """Add the row sums under the names that ``torch_impl`` uses."""

    def two(values: torch.Tensor, at: int) -> torch.Tensor:
        return values[at : at + 2]

    reducer.sum("sequences", sums[: triton_rows.TERMS])
    reducer.sum("broken", sums[triton_rows.BROKEN])
    reducer.max("ends", two(maxima, triton_rows.ENDS))
    reducer.max("gap_ends", two(maxima, triton_rows.GAP_ENDS))
    if config.rollout_is is not None:
        reducer.sum("weight_square", sums[triton_rows.WEIGHT_SQUARE])
        reducer.max("weight_ends", two(maxima, triton_rows.WEIGHT_ENDS))
        if config.rollout_is_batch_normalize:
            reducer.sum("weight_batch", two(sums, triton_rows.WEIGHT_BATCH))
    for option in config.rollout_rs:
        number = REJECTIONS.index(option)
        reducer.sum(option, two(sums, triton_rows.REJECTED + 2 * number))
        reducer.sum(f"{option}/sum", sums[triton_rows.OPTION_SUM + number])
        reducer.max(f"{option}/ends", two(maxima, triton_rows.OPTION_ENDS + 2 * number))
    if config.veto_threshold is not None:
        reducer.sum("veto", two(sums, triton_rows.VETOED))
    if config.rejects:
        reducer.sum("all", two(sums, triton_rows.ALL))
