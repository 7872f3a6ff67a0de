"""Correct for a rollout policy that differs from the trainer's: weights, masks and the loss.

The engine samples with FP8 weights, other kernels and perhaps an older policy, so a sampled token
has a different probability there than in the trainer. The ratio pi_trainer / pi_rollout is its
importance weight, which is truncated, masked or rejected as ``CorrectionConfig`` says.
"""

from trainer_bridge.correction.advantages import group_advantages
from trainer_bridge.correction.config import PRESETS, CorrectionConfig
from trainer_bridge.correction.correction import Correction, correct, correct_logprobs
from trainer_bridge.correction.loss import policy_loss
from trainer_bridge.correction.terms import reduce_tokens, reference_kl

__all__ = [
    "PRESETS",
    "Correction",
    "CorrectionConfig",
    "correct",
    "correct_logprobs",
    "group_advantages",
    "policy_loss",
    "reduce_tokens",
    "reference_kl",
]
