"""One batch's correction: weights, mask and metrics, computed in blocks of rows that bound the
memory.

Shapes: B sequences, T tokens of the longest response.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from trainer_bridge.correction import weights
from trainer_bridge.correction.config import PRESETS, CorrectionConfig, LossType
from trainer_bridge.metrics.alarms import Alarm, announce, check_alarms
from trainer_bridge.metrics.batch_inputs import check_tensors, check_values, checked_groups
from trainer_bridge.metrics.batch_metrics import add_mismatch, read_mismatch
from trainer_bridge.metrics.mismatch import Mismatch, Reducer, ones_where, row_blocks
from trainer_bridge.rollouts.rollout import Rollout


@dataclass(frozen=True)
class Correction:
    """What the loss needs: multiply each token's loss by its weight, average where mask is True.

    ``policy_loss`` does the multiplication. No tensor here requires a gradient.
    """

    weights_BT: torch.Tensor
    """Float32 [B, T]; 0 where mask_BT is False."""
    mask_BT: torch.Tensor
    """Bool [B, T]: the tokens to train on."""
    old_logprobs_BT: torch.Tensor
    """Float32 [B, T], pi_old of PPO's ratio: the trainer's logprobs, in bypass mode the rollout's;
    0 outside the mask of the rollout."""
    loss_type: LossType
    """The loss that ``policy_loss`` computes."""
    metrics: dict[str, float]
    """As ``correct_logprobs`` lists them; the same on every rank."""
    alarms: tuple[Alarm, ...]
    """Metrics beyond FP8's noise, see ``check_alarms``; the same on every rank. The first rank logs
    a metric's first alarm as a warning."""


@torch.inference_mode(False)  # what it returns is of a loss with a gradient
def correct(
    rollout: Rollout,
    trainer_logprobs_BT: torch.Tensor,
    config: str | CorrectionConfig = "decoupled_token_is",
    *,
    group: dist.ProcessGroup | None = None,
) -> Correction:
    """Correct one rollout; see ``correct_logprobs``.

    Args:
        rollout: B sequences, the longest of T tokens.
        trainer_logprobs_BT: log_softmax(logits / rollout.temperature) of rollout.tokens_BT, any
            float dtype; positions outside rollout.mask_BT may hold anything.
        config: the name of a preset in PRESETS, or a CorrectionConfig.
        group: normalize and average over these ranks; every rank must call.

    Returns:
        Weights, mask, metrics and alarms, on the device of the trainer's logprobs.

    Raises:
        ValueError: shapes or dtypes are wrong, a logprob is NaN, infinite or above 0 (by more than
            rounding), the mask is empty, or the preset is unknown.
    """
    check_tensors("correct", trainer_logprobs_BT=trainer_logprobs_BT)
    device = trainer_logprobs_BT.device
    return correct_logprobs(
        trainer_logprobs_BT,
        rollout.logprobs_BT.to(device),
        rollout.mask_BT.to(device),
        config,
        versions_BT=rollout.versions_BT,
        kv_clipped=rollout.kv_clipped,
        group=group,
    )


@torch.inference_mode(False)
def correct_logprobs(
    trainer_logprobs_BT: torch.Tensor,
    rollout_logprobs_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    config: str | CorrectionConfig = "decoupled_token_is",
    *,
    versions_BT: torch.Tensor | None = None,
    kv_clipped: float | None = None,
    group: dist.ProcessGroup | None = None,
) -> Correction:
    """Weigh and reject the tokens where mask_BT is True.

    Args:
        trainer_logprobs_BT: of the policy before the update, in bypass mode of the current one. Any
            float dtype; padding may hold anything. The result is on its device.
        rollout_logprobs_BT: the engine's logprobs, any float dtype, same device.
        mask_BT: bool, same device.
        config: the name of a preset (verl's, in PRESETS), or a CorrectionConfig.
        versions_BT: int64, on any device: adds metrics by policy version.
        kv_clipped: of the rollout; the largest one of all ranks is a metric of that name.
        group: batch normalization and metrics go over these ranks; every rank must call.

    Returns:
        Weights, mask, alarms, and the metrics of ``mismatch_metrics`` plus

            weight_mean, _min, _max, _ess   of the bounded weights, before batch normalization, over
                                            all tokens; _ess: effective sample size, 1 is best
            clipped_fraction                tokens whose ratio is above C, or outside the band
            weight_batch_mean               the divisor of batch normalization
            masked_fraction                 rejected tokens
            masked_sequence_fraction        sequences with a rejected token
            <option>/..., veto/...          see weights.read_rejections
            kv_clipped                      as given, the largest of all ranks

        The first two exist if the config weighs, weight_batch_mean if it normalizes, kv_clipped if
        a rank was given one, the rest if it rejects. Means over tokens also exist by policy version
        and by position.

    Raises:
        ValueError: as ``mismatch_metrics``, and for an unknown preset.
    """
    config = _config(config)
    given = trainer_logprobs_BT, rollout_logprobs_BT, mask_BT
    groups = checked_groups("correct", *given, versions_BT, group)
    reducer = Reducer()
    weights_BT, old_BT = (torch.empty_like(mask_BT, dtype=torch.float32) for _ in range(2))
    kept_BT = torch.empty_like(mask_BT)
    for rows in row_blocks(mask_BT):
        mismatch = Mismatch.of(*(tensor[rows] for tensor in given))
        means_BT: list[torch.Tensor] = []  # in the order of config.means
        applied_BT, kept_BT[rows] = mismatch.tokens_BT, mismatch.mask_BT
        if config.rollout_is is not None:
            means_BT += weights.add_weights(reducer, mismatch, config.rollout_is, config)
            applied_BT = means_BT[0] if config.applies_weights else applied_BT
        if config.rejects:
            kept_BT[rows] = weights.keep_tokens(reducer, mismatch, config)
            kept_ones_BT = ones_where(kept_BT[rows])
            means_BT.append(mismatch.tokens_BT - kept_ones_BT)
            applied_BT = applied_BT * kept_ones_BT
        add_mismatch(reducer, rows, mismatch, groups, means_BT)
        weights_BT[rows] = applied_BT
        old_BT[rows] = mismatch.rollout_BT if config.bypass_mode else mismatch.trainer_BT
    if config.applies_weights and config.rollout_is_batch_normalize:
        weights_BT /= weights.batch_mean(reducer, group)

    clipped = -1.0 if kv_clipped is None else kv_clipped  # each rank adds the same names
    reducer.max("kv_clipped", mask_BT.new_full((), clipped, dtype=torch.float64))
    values = reducer.reduce(group)
    check_values("correct", values)
    metrics = read_mismatch(values, groups, config.means)
    if config.rollout_is is not None:
        metrics |= weights.read_weights(values, metrics, config)
    if config.rejects:
        metrics |= weights.read_rejections(values, metrics, config)
    if (most := float(values["kv_clipped"])) >= 0:
        metrics["kv_clipped"] = most
    loss_type = config.loss_type if config.bypass_mode else "ppo_clip"
    alarms = check_alarms(metrics)
    if group is None or dist.get_rank(group) == 0:
        announce(alarms)
    return Correction(weights_BT, kept_BT, old_BT, loss_type, metrics, alarms)


def _config(config: str | CorrectionConfig) -> CorrectionConfig:
    if isinstance(config, CorrectionConfig):
        return config
    if config not in PRESETS:
        raise ValueError(
            f"correct: no preset is named {config!r}; use a CorrectionConfig, or one of "
            f"{', '.join(PRESETS)}"
        )
    return PRESETS[config]
