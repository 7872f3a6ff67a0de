"""Metrics of the mismatch between rollout and trainer, and alarms."""

from trainer_bridge.metrics.alarms import Alarm, check_alarms
from trainer_bridge.metrics.batch_metrics import mismatch_metrics

__all__ = [
    "Alarm",
    "check_alarms",
    "mismatch_metrics",
]
