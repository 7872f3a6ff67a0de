"""One batch's correction: weights, mask and metrics, computed in blocks of rows that bound the
memory.

Shapes: B sequences, T tokens of the longest response.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from trainer_bridge.correction import weights
from trainer_bridge.correction.config import PRESETS, CorrectionConfig, LossType
from trainer_bridge.metrics.alarms import Alarm, announce, check_alarms
from trainer_bridge.metrics.batch_inputs import (
    check_tensors,
    check_values,
    checked_groups,
    each_row,
)
from trainer_bridge.metrics.batch_metrics import add_mismatch, read_mismatch
from trainer_bridge.metrics.mismatch import Mismatch, Reducer, ones_where, row_blocks
from trainer_bridge.ranks.group import Local, group_of
from trainer_bridge.rollouts.batch import Rollout
from trainer_bridge.rollouts.rows import Rows, indices_of


@dataclass(frozen=True)
class Correction:
    """What the loss needs: multiply each token's loss by its weight, average where mask is True.

    ``policy_loss`` does the multiplication. No tensor here requires a gradient.
    ``correction[rows]`` has those rows alone, as wide as the longest of them, beside
    ``rollout[rows]``; counts, metrics and alarms stay those of the whole batch.
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
    lengths_B: torch.Tensor
    """Tokens of each response, with those outside the mask, int64 on the host; T where unknown."""
    tokens: int
    """True values of the masks of all ranks."""
    sequences: int
    """Sequences of all ranks with a True value."""
    ranks: int
    """Over which it goes."""

    def __len__(self) -> int:
        return len(self.lengths_B)

    @torch.inference_mode(False)
    def __getitem__(self, rows: Rows) -> "Correction":
        kept_R = torch.tensor(indices_of("correction", rows, len(self)), dtype=torch.int64)
        lengths_R = self.lengths_B[kept_R]
        width, on_device_R = max(lengths_R.tolist(), default=0), kept_R.to(self.mask_BT.device)
        weights_RT, mask_RT, old_RT = (
            tensor[on_device_R, :width]
            for tensor in (self.weights_BT, self.mask_BT, self.old_logprobs_BT)
        )
        return replace(
            self,
            weights_BT=weights_RT,
            mask_BT=mask_RT,
            old_logprobs_BT=old_RT,
            lengths_B=lengths_R,
        )


@torch.inference_mode(False)  # what it returns is of a loss with a gradient
def correct(
    rollout: Rollout,
    trainer_logprobs_BT: torch.Tensor,
    config: str | CorrectionConfig = "decoupled_token_is",
    *,
    train_on_B: Sequence[bool] | torch.Tensor | None = None,
    group: dist.ProcessGroup | Local | None = None,
) -> Correction:
    """Correct one rollout; see ``correct_logprobs``.

    Args:
        rollout: B sequences, the longest of T tokens.
        trainer_logprobs_BT: log_softmax(logits / rollout.temperature) of rollout.tokens_BT, any
            float dtype; positions outside rollout.mask_BT may hold anything.
        config: the name of a preset in PRESETS, or a CorrectionConfig.
        train_on_B: the sequences that stay in the mask, by default those that are complete. Metrics
            and batch normalization are of all.
        group: normalize, count and average over these ranks, each of which must call: by default
            all of the job, where torch.distributed is initialised; "local" for this one alone.

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
        lengths_B=[len(row) for row in rollout.tokens],
        train_on_B=rollout.is_complete_B if train_on_B is None else train_on_B,
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
    lengths_B: Sequence[int] | torch.Tensor | None = None,
    train_on_B: Sequence[bool] | torch.Tensor | None = None,
    group: dist.ProcessGroup | Local | None = None,
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
        lengths_B: tokens of each row before its padding, which ``correction[rows]`` cuts off; by
            default T.
        train_on_B: as for ``correct``, by default all.
        group: as for ``correct``.

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
    config, group = _config(config), group_of(group)
    given = trainer_logprobs_BT, rollout_logprobs_BT, mask_BT
    count, width = (*getattr(mask_BT, "shape", ()), 0, 0)[:2]  # checked below
    lengths_B, fault = each_row(
        *("lengths_B", [width] * count if lengths_B is None else lengths_B, torch.int64, count)
    )
    trained_B, of_trained = each_row(
        *("train_on_B", [True] * count if train_on_B is None else train_on_B, torch.bool, count)
    )
    groups = checked_groups("correct", *given, versions_BT, group, fault or of_trained)
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
    kept_BT &= trained_B.to(mask_BT.device)[:, None]
    weights_BT.masked_fill_(~kept_BT, 0.0)
    after_BT = torch.arange(width) >= lengths_B[:, None]
    reducer.sum("after", (after_BT.to(mask_BT.device) & mask_BT).sum())
    reducer.sum("trained", torch.stack([kept_BT.sum(), kept_BT.any(1).sum()]))
    reducer.max("kv_clipped", mask_BT.new_full((), clipped, dtype=torch.float64))
    values = reducer.reduce(group)
    check_values("correct", values)
    if values["after"]:
        raise ValueError("correct: lengths_B ends before mask_BT does; pass the tokens of each row")
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
    tokens, sequences = map(int, values["trained"].tolist())
    return Correction(
        weights_BT,
        kept_BT,
        old_BT,
        loss_type,
        metrics,
        alarms,
        lengths_B=lengths_B,
        tokens=tokens,
        sequences=sequences,
        ranks=1 if group is None else dist.get_world_size(group),
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
