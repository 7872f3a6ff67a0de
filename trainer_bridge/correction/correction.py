"""One batch's correction: weights, mask and metrics.

Shapes: B sequences, T tokens of the longest response.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainer_bridge.correction import rejection, weights
from trainer_bridge.correction.config import PRESETS, CorrectionConfig, LossType
from trainer_bridge.correction.correct_rows import correct_rows
from trainer_bridge.metrics.alarms import Alarm, announce, check_alarms
from trainer_bridge.metrics.batch_metrics import check_values, checked_groups, read_mismatch
from trainer_bridge.metrics.reducer import Reducer
from trainer_bridge.rollout import Rollout


@dataclass(frozen=True)
class Correction:
    """What the loss needs: multiply each token's loss by its weight, average where mask is True.

    ``policy_loss`` does the first. Nothing here carries a gradient.
    """

    weights_BT: torch.Tensor
    """Float32 [B, T]; 0 where mask_BT is False."""
    mask_BT: torch.Tensor
    """Bool [B, T]: the tokens to train on."""
    old_logprobs_BT: torch.Tensor
    """Float32 [B, T], pi_old of PPO's ratio: the trainer's logprobs, in bypass mode the rollout's;
    0 outside the mask that was given."""
    loss_type: LossType
    metrics: dict[str, float]
    alarms: tuple[Alarm, ...]
    """What is no longer FP8's noise, see ``check_alarms``; the same on every rank. The first of a
    metric is logged as a warning (by the first rank)."""


def correct(
    rollout: Rollout,
    trainer_logprobs_BT: torch.Tensor,
    config: str | CorrectionConfig = "decoupled_token_is",
    *,
    group: dist.ProcessGroup | None = None,
) -> Correction:
    """Correct one rollout; see ``correct_logprobs``.

    Args:
        trainer_logprobs_BT: log_softmax(logits / rollout.temperature) of rollout.tokens_BT;
            positions outside rollout.mask_BT may hold anything.
    """
    device = trainer_logprobs_BT.device
    return correct_logprobs(
        trainer_logprobs_BT,
        rollout.logprobs_BT.to(device),
        rollout.mask_BT.to(device),
        config,
        versions_BT=rollout.versions_BT,
        group=group,
    )


def correct_logprobs(
    trainer_logprobs_BT: torch.Tensor,
    rollout_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    config: str | CorrectionConfig = "decoupled_token_is",
    *,
    versions_BT: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Correction:
    """Weigh and reject the tokens where mask_BT is True.

    Args:
        trainer_logprobs_BT: of the policy before the update, in bypass mode of the current one. Any
            float dtype, without padding to look at; the result is on its device.
        config: the name of a preset (verl's, in PRESETS), or a CorrectionConfig.
        versions_BT: int64, on any device: metrics by policy version too.
        group: batch normalisation and metrics go over these ranks; every rank must call.

    Returns:
        weights, mask, alarms, and the metrics of ``mismatch_metrics`` joined by

        weight_mean, _min, _max, _ess   of the bounded weights, before the batch is normalised, over
                                        all tokens; _ess is the effective sample size, 1 is best
        clipped_fraction                of tokens whose ratio is above C, or outside the band
        weight_batch_mean               what weights were divided by
        masked_fraction                 of tokens that were rejected
        masked_sequence_fraction        of sequences with a rejected token
        <option>/..., veto/...          see rejection.read_rejections

        The first group is there if the config weighs, weight_batch_mean if it normalises, the rest
        if it rejects. Means over tokens come by policy version and by position as well.

    Raises:
        ValueError: as ``mismatch_metrics``, and for a name that is no preset's.
    """
    config = _config(config)
    given = trainer_logprobs_BT, rollout_logprobs_BT, mask_BT
    groups = checked_groups("correct", *given, versions_BT, group)
    reducer = Reducer()
    corrected = correct_rows(reducer, *given, groups, config)
    weights_BT = corrected.weights_BT
    if config.applies_weights and config.rollout_is_batch_normalize:
        weights_BT /= weights.batch_mean(reducer, group)

    values = reducer.reduce(group)
    check_values("correct", values)
    metrics = read_mismatch(values, groups, config.means)
    if config.rollout_is is not None:
        metrics |= weights.read_weights(values, metrics, config)
    if config.rejects:
        metrics |= rejection.read_rejections(values, metrics, config)
    loss_type = config.loss_type if config.bypass_mode else "ppo_clip"
    alarms = check_alarms(metrics)
    if group is None or dist.get_rank(group) == 0:
        announce(alarms)
    return Correction(
        weights_BT, corrected.mask_BT, corrected.old_logprobs_BT, loss_type, metrics, alarms
    )


def _config(config: str | CorrectionConfig) -> CorrectionConfig:
    if isinstance(config, CorrectionConfig):
        return config
    if config not in PRESETS:
        raise ValueError(
            f"correct: no preset is named {config!r}; use a CorrectionConfig, or one of "
            f"{', '.join(PRESETS)}"
        )
    return PRESETS[config]
