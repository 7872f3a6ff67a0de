"""Result files: rows of medians and spreads, the environment, and what failed.

A row has ``arm``, ``model``, ``case``, ``metric``, ``unit``, ``median``, ``min``, ``max`` and
``n``, the number of values.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.benchmark import Measurement
from benchmarks.files import write_whole

Row = dict[str, Any]
Results = dict[str, Any]
"""What a file holds: ``benchmark``, ``environment``, ``failures`` by job, and ``rows``."""

UNITS = {
    "_tokens_s": "tokens/s",
    "_tb_s": "TB/s",
    "_gb_s": "GB/s",
    "_gib": "GiB",
    "_bytes": "bytes",
    "_ms": "ms",
    "_us": "us",
    "_s": "s",
}
"""By the end of a metric's name; the first that fits."""
NATS = {"logprob_abs_diff_mean", "mismatch_kl_k3"}


def rows_of(measurements: Sequence[Measurement]) -> list[Row]:
    """Rows of one job; a case that was measured in several runs has the values of all."""
    found: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for measurement in measurements:
        for metric, values in measurement["values"].items():
            found[measurement["arm"], measurement["model"], measurement["case"], metric] += values
    return [
        {"arm": arm, "model": model, "case": case} | _summary(metric, values)
        for (arm, model, case, metric), values in found.items()
    ]


def earlier(path: Path, benchmark: str, environment: dict[str, Any]) -> Results:
    """What a file holds, if its run was of the same commit on the same machine, or nothing."""
    results = {"benchmark": benchmark, "environment": environment, "failures": {}, "rows": []}
    if not path.exists():
        return results
    found = json.loads(path.read_text())
    if _setting(found["environment"]) != _setting(environment):
        return results
    return results | {key: found[key] for key in ("failures", "rows")}


def updated(results: Results, job: str, rows: list[Row], failure: str | None) -> Results:
    """The same with what a job gave, in the place of what it gave before."""
    new = {identity(row): row for row in rows}
    kept = [new.pop(identity(row), row) for row in results["rows"]]
    failures = {name: text for name, text in results["failures"].items() if name != job}
    if failure is not None:
        failures[job] = failure
    return results | {"failures": failures, "rows": [*kept, *new.values()]}


def merged(benchmark: str, paths: Sequence[Path]) -> Results:
    """Several files of one run as one.

    Where several have a row, since an arm was started on several GPUs, it becomes one: the median
    of their medians, the least and the most of all values, and how many there were.
    """
    contents = [json.loads(path.read_text()) for path in paths]
    facts = contents[0]["environment"]
    for path, content in zip(paths, contents, strict=True):
        if _setting(content["environment"]) != _setting(facts):
            raise ValueError(
                f"{path.name} is of another machine, boot, commit or command than "
                f"{paths[0].name}; merge files of one run"
            )
    starts: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for content in contents:
        for row in content["rows"]:
            starts[identity(row)].append(row)
    rows = [_pooled(found) for found in starts.values()]
    failures = {job: text for content in contents for job, text in content["failures"].items()}
    return {"benchmark": benchmark, "environment": facts, "failures": failures, "rows": rows}


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a file whole, so that a run that is cut leaves a readable one. A row takes one line."""
    head = {key: value for key, value in content.items() if key != "rows"}
    text = json.dumps(head, indent=1)
    if "rows" in content:
        rows = ",\n  ".join(map(json.dumps, content["rows"]))
        text = f'{text[:-2]},\n "rows": [\n  {rows}\n ]\n}}'
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text + "\n")


def line(row: Row) -> str:
    """What is printed of a row."""
    head = f"{row['model']}, {row['case']}: {row['arm']}: {row['metric']}"
    return f"{head} {row['median']} {row['unit']} ({row['min']} to {row['max']}, n {row['n']})"


def identity(row: Row) -> tuple[str, ...]:
    """What a file holds once."""
    return tuple(row[key] for key in ("model", "arm", "case", "metric"))


def _setting(environment: dict[str, Any]) -> dict[str, Any]:
    """What figures depend on, which is not the day."""
    return {key: value for key, value in environment.items() if key != "date"}


def _summary(metric: str, values: list[float]) -> Row:
    spread = {"median": median(values), "min": min(values), "max": max(values)}
    spread = {name: float(f"{value:.5g}") for name, value in spread.items()}
    return {"metric": metric, "unit": _unit(metric), **spread, "n": len(values)}


def _pooled(starts: Sequence[Row]) -> Row:
    return starts[0] | {
        "median": float(f"{median(row['median'] for row in starts):.5g}"),
        "min": min(row["min"] for row in starts),
        "max": max(row["max"] for row in starts),
        "n": sum(row["n"] for row in starts),
    }


def _unit(metric: str) -> str:
    if metric in NATS:
        return "nats"
    ends = f"_{metric.replace(' ', '_')}"
    return next((unit for end, unit in UNITS.items() if ends.endswith(end)), "1")
