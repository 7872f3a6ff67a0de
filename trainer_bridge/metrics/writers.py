"""Write metrics: one line of JSON per step, and gauges for Prometheus."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from trainer_bridge.metrics.alarms import ADVICE, check_alarms

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

# Prefixes of metric names that become labels.
_LABELS = (
    (re.compile(r"version_(-?\d+)/"), "policy_version"),
    (re.compile(r"position_(\d+)/"), "position"),
    (re.compile(r"(\w+)/"), "rejection"),
)
PREFIX = "fp8rl_"


def append_jsonl(path: Path, step: int, metrics: Mapping[str, float], **more: Any) -> None:
    """Append ``{"step", **more, **metrics, "alarms"}`` as one line, in one write.

    "alarms" lists the metrics that have an alarm. Infinity and NaN, which JSON lacks, become null.

    Args:
        path: the JSONL file; its folder is created if needed.
        step: the training step.
        metrics: ``Correction.metrics``.
        more: further values of the line, such as the reward; numbers may be of torch or NumPy.
    """
    alarms = [alarm.metric for alarm in check_alarms(metrics)]
    values = {name: _finite(value) for name, value in {**more, **metrics}.items()}
    line = json.dumps({"step": step, **values, "alarms": alarms}, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(line + "\n")


def _finite(value: Any) -> Any:
    """None for Infinity and NaN; a number of torch or NumPy counts as Python's."""
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


class PrometheusMetrics:
    """The latest metrics as gauges: a collector for a registry of prometheus_client, which serves
    them (start_http_server) or writes them for node_exporter (write_to_textfile).

    Gauges are named fp8rl_<name>; the prefix before a slash becomes the label policy_version,
    position or rejection. Only versions of the last step are shown. fp8rl_alarm with the label
    metric is 1 if that metric has an alarm, of all tokens or of a policy version, else 0.
    """

    def __init__(self, labels: Mapping[str, str] | None = None) -> None:
        """Make a collector.

        Args:
            labels: added to each gauge, such as the run's name.
        """
        self._labels = dict(labels or {})
        self._values: dict[str, float] = {}
        self._alarms: set[str] = set()
        self._lock = Lock()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Replace the metrics that are shown.

        Args:
            step: the training step, shown as fp8rl_step.
            metrics: ``Correction.metrics``.
        """
        with self._lock:
            self._values = {"step": float(step), **metrics}
            self._alarms = {alarm.name for alarm in check_alarms(metrics)}

    def collect(self) -> Iterator["Metric"]:
        """The gauges; the registry calls this at each scrape."""
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:
            values, alarms = dict(self._values), self._alarms
        families: dict[tuple[str, str | None], Any] = {}
        for full_name, value in values.items():
            name, label, label_value = _split(full_name)
            family = families.get((name, label))
            if family is None:
                names = [*self._labels, *([label] if label else [])]
                help_ = f"{name} of the last step, see docs/correction.md of sgl-fp8rl"
                family = GaugeMetricFamily(PREFIX + name, help_, labels=names)
                families[name, label] = family
            family.add_metric([*self._labels.values(), *([label_value] if label else [])], value)
        yield from families.values()
        help_ = "1 if the last step's metric has an alarm, see docs/correction.md of sgl-fp8rl"
        alarm = GaugeMetricFamily(f"{PREFIX}alarm", help_, labels=[*self._labels, "metric"])
        for name in ADVICE if values else ():
            alarm.add_metric([*self._labels.values(), name], float(name in alarms))
        yield alarm


def _split(full_name: str) -> tuple[str, str | None, str]:
    """The name, the label and its value."""
    for pattern, label in _LABELS:
        if found := pattern.match(full_name):
            kind = label + "_" if label == "rejection" else "by_" + label + "_"
            return kind + full_name[found.end() :], label, found[1]
    return full_name, None, ""
