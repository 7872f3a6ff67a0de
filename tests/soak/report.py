"""What a soak did, as JSON and as lines."""

import sys
from datetime import datetime, timezone
from typing import Any

from tests import run
from tests.soak import resources
from tests.soak.faults import impossible
from tests.soak.soak import Soak

Report = dict[str, Any]
WIDTH = 30


def report(soak: Soak, counts: dict[str, int], seconds: float, facts: Report) -> Report:
    """The figures of a run so far."""
    growth, slopes = resources.growth(soak.samples), resources.slopes(soak.samples)
    return {
        **facts,
        "commit": run.commit(),
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        "seconds": round(seconds),
        "updates": soak.updates,
        "faults": counts,
        "impossible": impossible(),
        "heals": soak.heals,
        "quarantines": soak.quarantines,
        "tokens": soak.judge.tokens,
        "mixed tokens": soak.judge.mixed_tokens,
        "sequences of several versions": soak.judge.mixed_sequences,
        "requests refused in quarantine": soak.clients.refused,
        "difference": soak.judge.summary(),
        "bounds": {"token": soak.setting.token_bound, "segment": soak.setting.segment_bound},
        "growth": {name: round(grown, 1) for name, grown in growth.items()},
        "slopes": {name: round(slope, 1) for name, slope in slopes.items()},
        "series": resources.series(soak.samples),
    }


def shown(report: Report) -> str:
    """A line for each figure, but for long lists."""
    lines = []
    for name, value in report.items():
        if name in ("policies", "samples", "series"):
            continue
        if isinstance(value, dict):
            value = [f"{key} {of}" for key, of in value.items()]
        if isinstance(value, list):
            value = ", ".join(map(str, value))
        lines.append(f"{name}: {value}")
    return "\n".join(lines)


def show_progress(done: int, of: int, faults: int, tokens: int, seconds: float) -> None:
    """A bar that is drawn over itself; in a log, a line every twentieth."""
    filled = WIDTH * done // of
    line = (
        f"[{'#' * filled}{'.' * (WIDTH - filled)}] {done}/{of} updates, {faults} faults, "
        f"{tokens} tokens checked, {run.duration(seconds)}"
    )
    if sys.stderr.isatty():
        print(f"\r{line}", end="" if done < of else "\n", file=sys.stderr, flush=True)
    elif done == of or done * 20 // of != (done - 1) * 20 // of:
        print(line, file=sys.stderr, flush=True)
