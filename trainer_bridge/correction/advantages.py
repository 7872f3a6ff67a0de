"""Advantages of the responses to one prompt over each other.

Shapes: B sequences.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from trainer_bridge.metrics.batch_inputs import each_row
from trainer_bridge.rollouts.batch import Rollout

SMALLEST_STD = 1e-6
"""Added to a group's standard deviation."""


def group_advantages(
    rollout: Rollout,
    rewards_B: Sequence[float] | torch.Tensor,
    kind: Literal["grpo", "dr_grpo", "rloo"] = "grpo",
    *,
    train_on_B: Sequence[bool] | torch.Tensor | None = None,
) -> torch.Tensor:
    """The reward of each response over the mean of its group's.

    "grpo" divides by the group's standard deviation, over n - 1 (Shao et al. 2024,
    arXiv:2402.03300); "dr_grpo" does not (Liu et al. 2025, arXiv:2503.20783); "rloo" leaves the
    response out of its own mean (Ahmadian et al. 2024, arXiv:2402.14740). Alone in its group a
    response has advantage 0.

    Args:
        rollout: the sequences, whole groups of them.
        rewards_B: a number for each; of those left out it may be anything.
        kind: one of the three above.
        train_on_B: the sequences that count, by default those that are complete. Others are in no
            mean and get 0.

    Returns:
        Float32 [B, 1], on the host.

    Raises:
        ValueError: there is not one reward for each sequence, one that counts is NaN or infinite,
            the rollout knows no groups, or the kind is unknown.
    """
    if kind not in ("grpo", "dr_grpo", "rloo"):
        raise ValueError(f"group_advantages: kind is {kind!r}; pass grpo, dr_grpo or rloo")
    count = len(rollout)
    rewards, fault = each_row("rewards_B", rewards_B, torch.float64, count)
    counts, other = each_row(
        "train_on_B", rollout.is_complete_B if train_on_B is None else train_on_B, torch.bool, count
    )
    if len(rollout.groups) != count:
        other = f"the rollout has no groups; give it one for each of {count} sequences"
    if fault or other:
        raise ValueError(f"group_advantages: {fault or other}")
    rewards = rewards.where(counts, 0.0)
    if not rewards.isfinite().all():
        raise ValueError("group_advantages: a reward is NaN or infinite; look at what made it")
    _, groups = torch.tensor(rollout.groups, dtype=torch.int64).unique(return_inverse=True)
    ones = counts.double()

    def summed(values: torch.Tensor) -> torch.Tensor:
        """Over each sequence's group."""
        sums = values.new_zeros(len(values)).index_add_(0, groups, values)
        return sums[groups]

    n = summed(ones).clamp(min=1)
    centred = (rewards - summed(rewards) / n) * ones
    others = (n - 1).clamp(min=1)
    if kind == "grpo":
        centred /= (summed(centred.square()) / others).sqrt() + SMALLEST_STD
    if kind == "rloo":
        centred *= n / others
    return centred.float()[:, None]
