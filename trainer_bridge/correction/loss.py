"""The policy gradient loss of each token, with a correction.

Shapes: B sequences, T tokens of the longest response.
"""

from typing import Literal, TypeAlias, get_args

import torch

from trainer_bridge.correction.correction import Correction
from trainer_bridge.correction.terms import (
    check_reduction,
    counted,
    logprob_faults,
    raise_where,
    reduced,
)
from trainer_bridge.metrics.batch_inputs import check_tensors, fault_of
from trainer_bridge.metrics.mismatch import bounded

Reduce: TypeAlias = Literal["none", "tokens", "sequences", "constant"]


def policy_loss(
    logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    correction: Correction,
    *,
    clip: tuple[float, float] = (0.2, 0.2),
    dual_clip: float = 3.0,
    ratio: Literal["token", "sequence"] = "token",
    reduce: Reduce = "none",
    max_tokens: int | None = None,
) -> torch.Tensor:
    """Loss of each token, [B, T] in FP32 or wider, 0 where correction.mask_BT is False; or its part
    of the whole batch's loss.

    ppo_clip: w * max(-rho A, -clamp(rho, 1 - low, 1 + high) A), rho = pi / pi_old within e^+-20,
    for A < 0 at most -dual_clip A (Schulman 2017, arXiv:1707.06347; Ye 2020, arXiv:1912.09729).
    reinforce: -w A log pi. The weights w are constants: they change the measure, not the objective.

    Args:
        logprobs_BT: of the current policy, any float dtype, the only input that gets a gradient;
            positions outside the mask may hold anything, and get gradient 0.
        advantages_BT: [B, T], or [B, 1] with one for each sequence; of any real dtype, same device.
            Positions outside the mask may hold anything.
        correction: the batch's; of a micro-batch, ``correction[rows]``.
        clip: (low, high) of ppo_clip, not negative; clip-higher of DAPO (arXiv:2503.14476) is
            (0.2, 0.28).
        dual_clip: bound of ppo_clip's loss for negative advantages, at least 1.
        ratio: rho of each token, or the geometric mean of its sequence's (TRL's
            importance_sampling_level; GSPO: Zheng et al. 2025, arXiv:2507.18071, whose clip is
            (3e-4, 4e-4)).
        reduce: "tokens" is the mean over the tokens of the mask (verl's token-mean; DAPO:
            arXiv:2503.14476), "sequences" that of the means of sequences (seq-mean-token-mean;
            GRPO: arXiv:2402.03300), "constant" the sum over sequences times ``max_tokens`` (Dr.
            GRPO: arXiv:2503.20783), each of the whole batch on all ranks: the sum over
            micro-batches is it, once FSDP or DDP has averaged the gradients of the ranks of
            ``correct``.
        max_tokens: of "constant", what a response may have.

    Returns:
        "none": [B, T], with gradient; FP32, or FP64 where logprobs_BT are. Else a scalar.

    Raises:
        ValueError: shapes differ, logprobs are not floats, a value that counts is NaN, infinite or
            a logprob above 0 (by more than rounding), or a clip is out of range. Values are checked
            on the device, for which this waits once.
    """
    _check_clips(clip, dual_clip)
    _check_kind(reduce, max_tokens, ratio, correction)
    check_tensors("policy_loss", logprobs_BT=logprobs_BT, advantages_BT=advantages_BT)
    _check_shapes(logprobs_BT, advantages_BT, correction)
    mask_BT = correction.mask_BT
    wide = torch.promote_types(logprobs_BT.dtype, torch.float32)
    logprobs_BT = logprobs_BT.to(wide).masked_fill(~mask_BT, 0.0)
    if not advantages_BT.is_floating_point():  # uint8 has no negative
        advantages_BT = advantages_BT.to(wide)
    advantages_BT = advantages_BT.expand_as(mask_BT).masked_fill(~mask_BT, 0.0)
    fault = "an advantage is NaN or infinite; look at the rewards, and for a division by 0"
    raise_where("policy_loss", {fault: ~advantages_BT.isfinite(), **logprob_faults(logprobs_BT)})
    if correction.loss_type == "reinforce":
        losses_BT = -advantages_BT * logprobs_BT
    else:
        log_ratio_BT = (logprobs_BT - correction.old_logprobs_BT) * mask_BT
        if ratio == "sequence":  # the value of the mean, the gradient of each token
            mean_B1 = log_ratio_BT.detach().sum(1, keepdim=True) / counted(mask_BT)
            log_ratio_BT = mean_B1 + logprobs_BT - logprobs_BT.detach()
        ratio_BT = bounded(log_ratio_BT).exp()
        low, high = clip
        clipped_BT = ratio_BT.clamp(1 - low, 1 + high)
        losses_BT = torch.maximum(-advantages_BT * ratio_BT, -advantages_BT * clipped_BT)
        capped_BT = torch.minimum(losses_BT, -advantages_BT * dual_clip)
        losses_BT = capped_BT.where(advantages_BT < 0, losses_BT)
    losses_BT = losses_BT * correction.weights_BT.to(logprobs_BT.dtype)
    if reduce == "none":
        return losses_BT
    return reduced(losses_BT, correction, reduce, max_tokens)


def _check_kind(reduce: str, max_tokens: int | None, ratio: str, correction: Correction) -> None:
    check_reduction("policy_loss", reduce, max_tokens, get_args(Reduce))
    if ratio not in ("token", "sequence"):
        raise ValueError(f"policy_loss: ratio is {ratio!r}; pass token or sequence")
    if ratio == "sequence" and correction.loss_type == "reinforce":
        raise ValueError(
            "policy_loss: ratio is 'sequence' and the loss reinforce, which has none; use ppo_clip"
        )


def _check_clips(clip: tuple[float, float], dual_clip: float) -> None:
    try:
        low, high = clip
        is_sound = low >= 0 and high >= 0 and dual_clip >= 1
    except (TypeError, ValueError):
        is_sound = False
    if not is_sound:
        raise ValueError(
            f"policy_loss: clip is {clip!r} and dual_clip {dual_clip!r}; pass (low, high), neither "
            f"below 0, and a dual_clip of at least 1"
        )


def _check_shapes(
    logprobs_BT: torch.Tensor, advantages_BT: torch.Tensor, correction: Correction
) -> None:
    fault = fault_of(
        "pass logprobs of all sequences that were corrected, or for a micro-batch correction[rows]",
        logprobs_BT=logprobs_BT,
        weights_BT=correction.weights_BT,
        old_logprobs_BT=correction.old_logprobs_BT,
        mask_BT=correction.mask_BT,
    )
    whole, one_each = tuple(logprobs_BT.shape), (*logprobs_BT.shape[:1], 1)
    shape, device = tuple(advantages_BT.shape), advantages_BT.device
    if not fault and (shape not in (whole, one_each) or device != logprobs_BT.device):
        fault = (
            f"advantages_BT has shape {shape} on {device}; pass {whole}, or {one_each} for one a "
            f"sequence (advantages[:, None]), on {logprobs_BT.device}"
        )
    if fault:
        raise ValueError(f"policy_loss: {fault}")
