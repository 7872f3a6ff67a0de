"""The policy gradient loss of each token, with a correction.

Shapes: B sequences, T tokens of the longest response.
"""

import torch

from trainer_bridge.correction.correction import Correction
from trainer_bridge.metrics.mismatch import bounded


def policy_loss(
    logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    correction: Correction,
    *,
    clip: tuple[float, float] = (0.2, 0.2),
    dual_clip: float = 3.0,
) -> torch.Tensor:
    """Loss of each token, [B, T] in FP32 or wider, 0 where correction.mask_BT is False.

    ppo_clip: w * max(-rho A, -clamp(rho, 1 - low, 1 + high) A), rho = pi / pi_old within e^+-20,
    for A < 0 at most -dual_clip A (Schulman 2017, arXiv:1707.06347; Ye 2020, arXiv:1912.09729).
    reinforce: -w A log pi. The weights w are constants: they change the measure, not the objective.

    Args:
        logprobs_BT: of the current policy, any float dtype, the only input that gets a gradient;
            positions outside the mask may hold anything, and get gradient 0.
        advantages_BT: any shape that broadcasts to [B, T].
        correction: the batch's correction.
        clip: (low, high) of ppo_clip.
        dual_clip: bound of ppo_clip's loss for negative advantages.

    Returns:
        [B, T], with gradient; FP32, or FP64 where logprobs_BT are.
    """
    mask_BT = correction.mask_BT
    wide = torch.promote_types(logprobs_BT.dtype, torch.float32)
    logprobs_BT = logprobs_BT.to(wide).masked_fill(~mask_BT, 0.0)
    advantages_BT = advantages_BT.expand_as(mask_BT).masked_fill(~mask_BT, 0.0)
    if correction.loss_type == "reinforce":
        losses_BT = -advantages_BT * logprobs_BT
    else:
        ratio_BT = bounded(logprobs_BT - correction.old_logprobs_BT).exp()
        low, high = clip
        clipped_BT = ratio_BT.clamp(1 - low, 1 + high)
        losses_BT = torch.maximum(-advantages_BT * ratio_BT, -advantages_BT * clipped_BT)
        capped_BT = torch.minimum(losses_BT, -advantages_BT * dual_clip)
        losses_BT = capped_BT.where(advantages_BT < 0, losses_BT)
    return losses_BT * correction.weights_BT.to(logprobs_BT.dtype)
