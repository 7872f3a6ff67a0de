"""Metrics of the mismatch between rollout and trainer: alarms, other frameworks' names, writers."""

from trainer_bridge.metrics.alarms import Alarm, check_alarms
from trainer_bridge.metrics.batch_metrics import mismatch_metrics
from trainer_bridge.metrics.framework_names import NAMES
from trainer_bridge.metrics.plot import draw
from trainer_bridge.metrics.worst import TokenMismatch, worst_tokens
from trainer_bridge.metrics.writers import PrometheusMetrics, append_jsonl

__all__ = [
    "NAMES",
    "Alarm",
    "PrometheusMetrics",
    "TokenMismatch",
    "append_jsonl",
    "check_alarms",
    "draw",
    "mismatch_metrics",
    "worst_tokens",
]
