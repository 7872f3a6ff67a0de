"""The block of docs/correction.md about what a correction takes, from results of correction.py."""

import json
from typing import Any

from benchmarks.markdown_tables import Metrics, cell

ARMS = ("one core", "one GPU")
OPERATIONS = ("correction_launches", "{:.0f}")
COLUMNS = {
    "one core": {"operations": OPERATIONS},
    "one GPU": {"launches": OPERATIONS, "kernels": ("correction_kernels_ms", "{:.2f} ms")},
}
"""What follows an arm's time: heading, metric and form."""


def times(text: str) -> str:
    """A line a case; as many columns as the machine had arms."""
    content = json.loads(text)
    e, rows = content["environment"], content["rows"]
    found: dict[str, dict[str, Metrics]] = {}
    for row in rows:
        found.setdefault(row["case"], {}).setdefault(row["arm"], {})[row["metric"]] = row
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in rows)]
    known = {(row["arm"], row["metric"]) for row in rows}
    more = {
        arm: {name: how for name, how in COLUMNS[arm].items() if (arm, how[0]) in known}
        for arm in arms
    }
    columns = [name for arm in arms for name in (arm, *more[arm])]
    lines = [f"| {rows[0]['model']} | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for case, by_arm in found.items():
        cells = [case]
        for arm in arms:
            metrics = by_arm.get(arm, {})
            cells.append(_spread(metrics["correction_ms"]) if metrics else "")
            cells += [cell(metrics, *how) for how in more[arm].values()]
        lines.append(f"| {' | '.join(cells)} |")
    core = f", a core of {e['cpu']}" if "cpu" in e else ""
    sglang = f"SGLang {e['sglang']}, " if "sglang" in e else ""
    runs = max(row["n"] for row in rows)
    lines += [
        "",
        f"`{e['command']}`: {e['device']}{core}, {sglang}torch {e['torch']}, {e['date']}, commit "
        f"{e['commit']}. Medians of {runs} (least to most), until the metrics are read. "
        "Operations: of torch, on a block of 65536 tokens.",
    ]
    return "\n".join(lines)


def _spread(row: dict[str, Any]) -> str:
    digits = 0 if row["median"] >= 10 else 2
    median, least, most = (f"{row[name]:.{digits}f}" for name in ("median", "min", "max"))
    return f"{median} ms ({least} to {most})"
