"""Metrics of the mismatch between rollout and trainer, and alarms."""

from trainer_bridge.metrics.alarms import Alarm, check_alarms
from trainer_bridge.metrics.batch_metrics import mismatch_metrics
from trainer_bridge.metrics.worst import TokenMismatch, worst_tokens

__all__ = [
    "Alarm",
    "TokenMismatch",
    "check_alarms",
    "mismatch_metrics",
    "worst_tokens",
]
