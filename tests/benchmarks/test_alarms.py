"""Planted faults as they were measured: today's thresholds judge them as the page says."""

import json
from pathlib import Path

from trainer_bridge.metrics import check_alarms

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "alarms.json"
FIRED = "alarm: "
"""A metric with this before an alarm's name is the number of batches in which the alarm fired."""
BATCHES = 4
FAULTS = (
    "one matrix's scales doubled",
    "one matrix's scales lost (1.0)",
    "FP8 KV at scale 1, K beyond 448",
    "one tensor never loaded",
    "20 steps old",
    "1 of 4 engines 20 steps old",
    "trainer without temperature 0.7",
    "raw logprobs, temperature 0.7",
    "top-p 0.95, logprobs of it",
    "logprobs one token late",
)


def test_the_results_are_of_todays_thresholds() -> None:
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in json.loads(RESULTS.read_text())["rows"]:
        place = row["model"], row["arm"], row["case"]
        found.setdefault(place, {})[row["metric"]] = row["median"]
    fired: dict[tuple[str, str], dict[str, float]] = {}
    for (model, arm, case), metrics in found.items():
        counts = {k.removeprefix(FIRED): n for k, n in metrics.items() if k.startswith(FIRED)}
        fired[model, arm] = counts
        assert not (case == "healthy" and counts), arm
        # judged anew, from medians of the batches
        again = {alarm.metric for alarm in check_alarms(metrics)}
        whole = {name: count for name, count in counts.items() if "/" not in name}
        always = {name for name, count in whole.items() if count == BATCHES}
        assert always <= again <= whole.keys(), arm
    for name in FAULTS:
        assert fired["sums", name], name
        # of "text", 20 steps change as much as FP8 does
        assert fired["text", name] or "20 steps" in name, name
