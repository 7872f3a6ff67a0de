"""The block of docs/correction.md about what a correction takes, from results of correction.py."""

import json
from typing import Any

ARMS = ("one core", "one GPU")


def times(text: str) -> str:
    """A line a case; as many columns as the machine had arms."""
    content = json.loads(text)
    e, rows = content["environment"], content["rows"]
    found: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["case"], {})[row["arm"], row["metric"]] = row
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in rows)]
    lines = [
        f"| {rows[0]['model']} | {' | '.join(f'{arm} | launches' for arm in arms)} |",
        "|---" * (2 * len(arms) + 1) + "|",
    ]
    for case, metrics in found.items():
        cells = [case]
        for arm in arms:
            took, launches = (
                metrics.get((arm, name)) for name in ("correction_ms", "correction_launches")
            )
            cells.append(_spread(took) if took else "")
            cells.append(f"{launches['median']:.0f}" if launches else "")
        lines.append(f"| {' | '.join(cells)} |")
    core = f", a core of {e['cpu']}" if "cpu" in e else ""
    sglang = f"SGLang {e['sglang']}, " if "sglang" in e else ""
    runs = max(row["n"] for row in rows)
    lines += [
        "",
        f"`{e['command']}`: {e['device']}{core}, {sglang}torch {e['torch']}, {e['date']}, commit "
        f"{e['commit']}. Medians of {runs} (least to most), until the metrics are read.",
    ]
    return "\n".join(lines)


def _spread(row: dict[str, Any]) -> str:
    digits = 0 if row["median"] >= 10 else 2
    median, least, most = (f"{row[name]:.{digits}f}" for name in ("median", "min", "max"))
    return f"{median} ms ({least} to {most})"
