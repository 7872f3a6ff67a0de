"""Metrics of the mismatch of rollout and trainer, their names elsewhere, and ways out."""

from trainer_bridge.metrics.names import NAMES
from trainer_bridge.metrics.plot import draw
from trainer_bridge.metrics.report import mismatch_metrics
from trainer_bridge.metrics.writers import PrometheusMetrics, append_jsonl

__all__ = ["NAMES", "PrometheusMetrics", "append_jsonl", "draw", "mismatch_metrics"]
