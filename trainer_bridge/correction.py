"""How far the rollout policy is from the trainer's, and weights that correct for it.

The engine samples with FP8 weights, other kernels and perhaps an older policy, so a sampled token
has another probability there than in the trainer. Mismatch is the trainer's logprob minus the
rollout's, log(pi_trainer / pi_rollout); its exponential, the ratio, is the importance weight of the
token. Truncated importance sampling (TIS) caps the weight; masked importance sampling (MIS, also
called IcePop) drops the tokens whose ratio leaves a band.

Shapes: B sequences, T tokens of the longest response, N tokens that count.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from trainer_bridge.rollout import PAD_VERSION, Rollout

# A log ratio is held within +-20 before exp, as verl does; exp(2 * 20) is still far from overflow.
LOG_RATIO_BOUND = 20.0
PERCENTILES = (1, 50, 99)
HALVINGS = 32  # of a range of at most 40: percentiles exact to 1e-8, finer than a float32 logprob


@dataclass(frozen=True)
class Correction:
    """What the loss needs: multiply each token's loss by its weight, average where mask is True."""

    weights_BT: torch.Tensor
    """Float32 [B, T], no gradient; 0 where mask_BT is False."""
    mask_BT: torch.Tensor
    """Bool [B, T]: the tokens to train on."""
    metrics: dict[str, float]


def correct(
    rollout: Rollout,
    trainer_logprobs_BT: torch.Tensor,
    *,
    mode: Literal["tis", "mis"] = "tis",
    clip: float = 2.0,
    band: tuple[float, float] = (0.5, 5.0),
    group: dist.ProcessGroup | None = None,
) -> Correction:
    """Token-level importance weights of the trainer's policy over the rollout's.

    Truncation: Ionides 2008, doi:10.1198/106186008X320456; band: IcePop, as in verl's
    ``rollout_correction``.

    Args:
        trainer_logprobs_BT: log_softmax(logits / rollout.temperature) of rollout.tokens_BT;
            positions outside rollout.mask_BT may hold anything. Any float dtype; the result is on
            its device.
        mode: "tis" is min(ratio, clip); "mis" is the ratio inside the closed band and 0 outside of
            it, where mask_BT becomes False as well.
        group: reduce the metrics over these ranks; every rank must call. None: this process alone.

    Returns:
        weights, mask, and the metrics of ``mismatch_metrics`` (by policy version too), joined by
        weight_mean, weight_ess (effective sample size as a fraction of the tokens), and
        clipped_fraction (tis) or masked_fraction (mis).

    Raises:
        ValueError: as ``mismatch_metrics``, and for a bad mode, clip or band.
    """
    if mode not in ("tis", "mis"):
        raise ValueError(f"correct: mode is {mode!r}; use 'tis' or 'mis'")
    low, high = band
    if not (0 < clip < math.inf and 0 <= low < high):
        raise ValueError(
            f"correct: clip is {clip} and band is {band}; clip must be positive and finite, "
            f"and band an ascending pair from 0"
        )
    device = trainer_logprobs_BT.device
    mask_BT = rollout.mask_BT.to(device)
    rollout_logprobs_BT = rollout.logprobs_BT.to(device)
    metrics = mismatch_metrics(
        trainer_logprobs_BT,
        rollout_logprobs_BT,
        mask_BT,
        versions_BT=rollout.versions_BT.to(device),
        group=group,
    )
    mismatch_BT = _mismatch(trainer_logprobs_BT, rollout_logprobs_BT, mask_BT)
    ratio_BT = _bounded(mismatch_BT).exp()
    if mode == "tis":
        name, kept_BT, changed_BT = "clipped_fraction", mask_BT, mask_BT & (ratio_BT > clip)
        ratio_BT = ratio_BT.clamp(max=clip)
    else:
        kept_BT = mask_BT & (ratio_BT >= low) & (ratio_BT <= high)
        name, changed_BT = "masked_fraction", mask_BT & ~kept_BT
    weights_BT = ratio_BT * kept_BT

    sums = torch.stack([weights_BT.sum(), weights_BT.square().sum(), changed_BT.sum()])
    total, squares, changed = _all_reduce(sums, "sum", group).tolist()
    metrics["weight_mean"] = total / metrics["tokens"]
    metrics["weight_ess"] = total**2 / (metrics["tokens"] * squares) if squares else 0.0
    metrics[name] = changed / metrics["tokens"]
    return Correction(weights_BT.float(), kept_BT, metrics)


def mismatch_metrics(
    trainer_logprobs_BT: torch.Tensor,
    rollout_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    versions_BT: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, float]:
    """The mismatch of the tokens where mask_BT is True, computed in float64.

    With x = trainer - rollout logprob, r = exp(x), tokens weighing the same across ranks:

    tokens, sequences                   counts (a sequence counts if it has a token)
    mismatch_kl_k1, mismatch_kl_k3      KL(rollout || trainer): mean of -x; of r - 1 - x (Schulman)
    ratio_mean, _min, _max, _p01, ...   of r; p01 is the smallest r with 1% of all r at or below
    ess                                 sum(r)^2 / (N sum(r^2)): effective sample size, 1 is best
    chi2_token, chi2_seq                mean of r^2, less 1; r of a token, or the sequence's product
    logprob_abs_diff_mean, _max         of |x|
    token_mult_prob_error               mean of exp(|x|); NeMo-RL worries above 1.05
    log_ppl_gap, ppl_ratio              mean of g, of exp(g), over sequences; g is its mean of -x

    Where versions_BT shows several policy versions, version_<v>/<name> repeats each for the tokens
    of version v (its sequences are then the parts that v sampled).

    Args:
        group: reduce over these ranks; T and B may differ. All of them get the same numbers, or
            all raise.

    Raises:
        ValueError: shapes differ, the mask is not bool, a logprob is no finite number where mask_BT
            is True, or there is no token at all.
    """
    device = trainer_logprobs_BT.device
    fault = _fault(trainer_logprobs_BT, rollout_logprobs_BT, mask_BT, versions_BT)
    # Every rank learns of a fault before the others wait for its numbers.
    report = torch.tensor([int(fault is not None), int(mask_BT.sum())], device=device)
    faults, tokens = _all_reduce(report, "sum", group).tolist()
    if fault is not None:
        raise ValueError(f"mismatch_metrics: {fault}")
    if faults:
        raise ValueError(
            f"mismatch_metrics: {faults} other ranks refused their inputs; read what they raised"
        )
    if not tokens:
        raise ValueError("mismatch_metrics: mask_BT selects no token; pass at least one response")

    mismatch_BT = _mismatch(trainer_logprobs_BT, rollout_logprobs_BT, mask_BT)
    metrics = _metrics(mismatch_BT, mask_BT, group)
    if versions_BT is not None:
        versions = _union(torch.unique(versions_BT[mask_BT]), group)
        for version in versions if len(versions) > 1 else []:
            part = _metrics(mismatch_BT, mask_BT & (versions_BT == version), group)
            metrics |= {f"version_{version}/{name}": value for name, value in part.items()}
    return metrics


def _fault(
    trainer_logprobs_BT: torch.Tensor,
    rollout_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    versions_BT: torch.Tensor | None,
) -> str | None:
    """What is wrong with the inputs on this rank, if anything."""
    others = {"rollout_logprobs_BT": rollout_logprobs_BT, "mask_BT": mask_BT}
    if versions_BT is not None:
        others["versions_BT"] = versions_BT
    shape, shapes = tuple(trainer_logprobs_BT.shape), {k: tuple(v.shape) for k, v in others.items()}
    if len(shape) != 2 or set(shapes.values()) != {shape}:
        return (
            f"trainer_logprobs_BT has shape {shape} against {shapes}; "
            f"pass one [B, T] logprob for each response token, without the prompt"
        )
    if mask_BT.dtype != torch.bool:
        return f"mask_BT has dtype {mask_BT.dtype}; pass it as bool"
    mismatch_BT = _mismatch(trainer_logprobs_BT, rollout_logprobs_BT, mask_BT)
    if broken := int((~mismatch_BT.isfinite()).sum()):
        return (
            f"{broken} tokens have a trainer or rollout logprob that is no finite number; "
            f"look for NaN or Inf in the logits, and for a mask that covers padding"
        )
    return None


def _mismatch(
    trainer_logprobs_BT: torch.Tensor, rollout_logprobs_BT: torch.Tensor, mask_BT: torch.Tensor
) -> torch.Tensor:
    """Trainer minus rollout logprob, float64 [B, T], 0 outside the mask."""
    difference_BT = trainer_logprobs_BT.detach().double() - rollout_logprobs_BT.detach().double()
    return difference_BT.where(mask_BT, 0.0)


def _metrics(
    mismatch_BT: torch.Tensor, mask_BT: torch.Tensor, group: dist.ProcessGroup | None
) -> dict[str, float]:
    x_N = mismatch_BT[mask_BT]
    length_B = mask_BT.sum(1)
    sum_S = mismatch_BT.where(mask_BT, 0.0).sum(1)[length_B > 0]  # S: sequences that have a token
    gap_S = -sum_S / length_B[length_B > 0]
    token_terms = {
        "mismatch_kl_k1": -x_N,
        "mismatch_kl_k3": _bounded(x_N).expm1() - x_N,
        "ratio_mean": _bounded(x_N).exp(),
        "chi2_token": _bounded(x_N).exp().square(),
        "logprob_abs_diff_mean": x_N.abs(),
        "token_mult_prob_error": _bounded(x_N.abs()).exp(),
    }
    sequence_terms = {
        "chi2_seq": _bounded(sum_S).exp().square(),
        "log_ppl_gap": gap_S,
        "ppl_ratio": _bounded(gap_S).exp(),
    }
    terms = [*token_terms.values(), *sequence_terms.values()]
    sums = torch.stack([term.sum() for term in terms])
    counts = sums.new_tensor([x_N.numel(), sum_S.numel()])
    tokens, sequences, *totals = _all_reduce(torch.cat([counts, sums]), "sum", group).tolist()
    divisors = [tokens] * len(token_terms) + [sequences] * len(sequence_terms)
    means = [total / count for total, count in zip(totals, divisors, strict=True)]
    metrics = dict(zip([*token_terms, *sequence_terms], means, strict=True))
    metrics["ess"] = metrics["ratio_mean"] ** 2 / metrics["chi2_token"]
    metrics["chi2_token"] -= 1
    metrics["chi2_seq"] -= 1

    # The infinity is for a rank without tokens, which must not decide an extreme.
    ends = torch.stack([torch.cat([v, v.new_tensor([-math.inf])]).max() for v in (-x_N, x_N)])
    ends = _all_reduce(ends, "max", group)
    bounds = _bounded(torch.stack([-ends[0], ends[1]]))
    percentiles = _percentiles(_bounded(x_N), tokens, bounds, group)
    ratios = torch.cat([bounds, percentiles]).exp().tolist()
    names = ["ratio_min", "ratio_max", *(f"ratio_p{percent:02}" for percent in PERCENTILES)]
    metrics |= dict(zip(names, ratios, strict=True))
    metrics["logprob_abs_diff_max"] = ends.max().item()
    return {"tokens": tokens, "sequences": sequences, **metrics}


def _percentiles(
    x_N: torch.Tensor, count: float, bounds: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Of the `count` values of all ranks, which lie within `bounds` [2], found by bisection.

    Gathering the values would cost memory with the number of ranks; torch.quantile stops at 2**24.
    """
    sorted_N = x_N.sort().values
    needed_P = (x_N.new_tensor(PERCENTILES) * count / 100).ceil()
    low_P, high_P = bounds[0].expand_as(needed_P), bounds[1].expand_as(needed_P)
    for _ in range(HALVINGS):
        middle_P = (low_P + high_P) / 2
        reached_P = torch.searchsorted(sorted_N, middle_P, right=True)
        enough_P = _all_reduce(reached_P, "sum", group) >= needed_P
        low_P, high_P = low_P.where(enough_P, middle_P), middle_P.where(enough_P, high_P)
    return high_P


def _bounded(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _union(versions_V: torch.Tensor, group: dist.ProcessGroup | None) -> list[int]:
    """All ranks' policy versions, ascending."""
    if group is not None:
        longest = int(_all_reduce(versions_V.new_tensor([len(versions_V)]), "max", group))
        padded_V = versions_V.new_full((longest,), PAD_VERSION)
        padded_V[: len(versions_V)] = versions_V
        gathered = [torch.empty_like(padded_V) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, padded_V, group=group)
        versions_V = torch.cat(gathered)
    return sorted(set(versions_V.tolist()) - {PAD_VERSION})


def _all_reduce(
    tensor: torch.Tensor, op: Literal["sum", "max"], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The tensor reduced over the group; itself where there is none."""
    if group is not None:
        dist.all_reduce(tensor, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op], group)
    return tensor
