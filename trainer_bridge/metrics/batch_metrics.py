"""How far the rollout policy is from the trainer's: every metric, from one pass over the batch.

Shapes: B sequences, T tokens of the longest response.
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from trainer_bridge.metrics.batch_inputs import check_values, checked_groups
from trainer_bridge.metrics.groups import Groups, bins_of, percentiles
from trainer_bridge.metrics.mismatch import (
    LOG_RATIO_BOUND,
    Mismatch,
    Reducer,
    Values,
    bounded,
    ends,
    row_blocks,
)
from trainer_bridge.ranks.group import Local, group_of

PERCENTILES = (1, 50, 99)


def mismatch_metrics(
    trainer_logprobs_BT: torch.Tensor,
    rollout_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    versions_BT: torch.Tensor | None = None,
    group: dist.ProcessGroup | Local | None = None,
) -> dict[str, float]:
    """The mismatch of the tokens where mask_BT is True, computed in float64.

    x = trainer - rollout logprob, r = exp(x). Means go over the tokens of all ranks, or over all
    sequences that have a token, marked (S):

        tokens, sequences                 counts
        mismatch_kl_k1, mismatch_kl_k3    KL(rollout || trainer): mean of -x; of r - 1 - x
        ratio_mean, _min, _max            of r
        ratio_p01, _p50, _p99             the smallest r with 1% of all r at or below, and so on;
                                          the log has a relative error of 0.8% (see groups.py)
        ess                               sum(r)^2 / (N sum(r^2)): effective sample size, 1 is best
        chi2_token, chi2_seq (S)          mean of r^2, minus 1; r of a token or a sequence's product
        logprob_abs_diff_mean, _max       of |x|
        token_mult_prob_error             mean of exp(|x|); NeMo-RL warns above 1.05
        rollout_nll                       mean of -rollout logprob: estimates its policy's entropy
        log_ppl_gap, _abs, _min, _max (S) of g, a sequence's mean of -x: log(trainer / rollout PPL)
        ppl_ratio (S)                     mean of exp(g)
        trainer_ppl, rollout_ppl (S)      mean of the perplexity, exp of a sequence's mean -logprob
        trainer_log_ppl, rollout_log_ppl  mean of its log (S)

    Exponents are clamped to +-20. If there are several groups, position_<p>/<name> repeats the
    token metrics (without extremes) for the tokens from position p of the response up to the next
    group, and version_<v>/<name> for those that policy version v sampled.

    Args:
        trainer_logprobs_BT: any float dtype; may hold anything outside the mask.
        rollout_logprobs_BT: the same, on the same device.
        mask_BT: bool, on the same device: the tokens that count.
        versions_BT: int64, on any device: the policy version of each token.
        group: reduce over these ranks, by default all of the job, where torch.distributed is
            initialised; "local" for this one alone. T and B may differ. All get the same numbers,
            or all raise.

    Returns:
        The metrics by name.

    Raises:
        ValueError: shapes differ, logprobs are not floats, the mask is not bool, a logprob is NaN,
            infinite or above 0 (by more than rounding) where mask_BT is True, or there are no
            tokens.
    """
    group = group_of(group)
    given = trainer_logprobs_BT, rollout_logprobs_BT, mask_BT
    groups = checked_groups("mismatch_metrics", *given, versions_BT, group)
    reducer = Reducer()
    for rows in row_blocks(mask_BT):
        add_mismatch(reducer, rows, Mismatch.of(*(tensor[rows] for tensor in given)), groups)
    values = reducer.reduce(group)
    check_values("mismatch_metrics", values)
    return read_mismatch(values, groups)


def add_mismatch(
    reducer: Reducer,
    rows: slice,
    mismatch: Mismatch,
    groups: Groups,
    more_BT: Sequence[torch.Tensor] = (),
) -> None:
    """Add a block of rows; ``more_BT`` are terms whose mean over tokens is a metric."""
    log_ratio_BT, ratio_BT = mismatch.log_ratio_BT, mismatch.ratio_BT
    counted_BT = ratio_BT * mismatch.tokens_BT
    terms_BT = [
        mismatch.tokens_BT,
        log_ratio_BT,
        mismatch.excess_BT,
        counted_BT,
        counted_BT.square(),
        log_ratio_BT.abs(),
        torch.maximum(ratio_BT, ratio_BT.reciprocal()) - 1,  # exp(|x|) - 1
        mismatch.rollout_BT,
        *more_BT,
    ]
    groups.add(reducer, rows, terms_BT, bins_of(mismatch.bounded_BT), mismatch.tokens_BT)

    present_B, gap_B = mismatch.present_B, -mismatch.sequence_mean_B
    nll_2B = -torch.stack([mismatch.trainer_BT.sum(1), mismatch.rollout_BT.sum(1)])
    nll_2B /= mismatch.lengths_B.clamp(min=1)
    sequence_terms = [
        present_B,
        (2 * bounded(mismatch.sequence_sum_B)).expm1(),
        gap_B,
        gap_B.abs(),
        bounded(gap_B).expm1(),
        *nll_2B,
        *(bounded(nll_2B).exp() * present_B),
    ]
    reducer.sum("sequences", torch.stack(sequence_terms).sum(1))
    reducer.max("ends", ends(log_ratio_BT, mismatch.absent_BT))
    reducer.max("gap_ends", ends(gap_B, mismatch.absent_B))
    reducer.sum("broken", (mismatch.sequence_sum_B * 0 != 0).sum())  # has a NaN or an infinity
    reducer.max("most", mismatch.most)


def read_mismatch(values: Values, groups: Groups, more: tuple[str, ...] = ()) -> dict[str, float]:
    """The metrics from the sums of ``add_mismatch``, its ``more_BT`` under the names ``more``."""
    sums, names = values["tokens"], groups.names
    ranks = percentiles(values["histogram"], PERCENTILES)
    parts = [_of_tokens(*pair, more) for pair in zip(sums.tolist(), ranks, strict=True)]
    metrics = parts[0] | _of_sequences(values["sequences"].tolist())

    lowest, highest = values["ends"].tolist()
    gap_lowest, gap_highest = values["gap_ends"].tolist()
    metrics["ratio_min"], metrics["ratio_max"] = _exp(-lowest), _exp(highest)
    metrics["logprob_abs_diff_max"] = max(lowest, highest)
    metrics["log_ppl_gap_min"], metrics["log_ppl_gap_max"] = -gap_lowest, gap_highest

    for kind in ("position_", "version_"):
        found = [
            (name, part)
            for name, part in zip(names, parts, strict=True)
            if name.startswith(kind) and part["tokens"]
        ]
        for prefix, part in found if len(found) > 1 else []:
            metrics |= {f"{prefix}{name}": value for name, value in part.items()}
    return metrics


def _of_tokens(
    sums: list[float], percentiles: list[float], more: tuple[str, ...]
) -> dict[str, float]:
    tokens = sums[0]
    if not tokens:
        return {"tokens": 0.0}
    log_ratio, excess, ratio, square, magnitude, error, rollout, *others = (
        total / tokens for total in sums[1:]
    )
    ranks = {
        f"ratio_p{percent:02}": math.exp(value)
        for percent, value in zip(PERCENTILES, percentiles, strict=True)
    }
    return {
        "tokens": tokens,
        "mismatch_kl_k1": -log_ratio,
        "mismatch_kl_k3": excess - log_ratio,
        "ratio_mean": ratio,
        **ranks,
        "ess": ratio**2 / square,
        "chi2_token": square - 1,
        "logprob_abs_diff_mean": magnitude,
        "token_mult_prob_error": 1 + error,
        "rollout_nll": -rollout,
        **dict(zip(more, others, strict=True)),
    }


def _of_sequences(sums: list[float]) -> dict[str, float]:
    sequences = sums[0]
    chi2, gap, gap_abs, ratio, *perplexities = (total / sequences for total in sums[1:])
    names = ("trainer_log_ppl", "rollout_log_ppl", "trainer_ppl", "rollout_ppl")
    return {
        "sequences": sequences,
        "chi2_seq": chi2,
        "log_ppl_gap": gap,
        "log_ppl_gap_abs": gap_abs,
        "ppl_ratio": 1 + ratio,
        **dict(zip(names, perplexities, strict=True)),
    }


def _exp(log_ratio: float) -> float:
    return math.exp(min(max(log_ratio, -LOG_RATIO_BOUND), LOG_RATIO_BOUND))
