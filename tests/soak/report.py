"""What a soak did, as JSON and as one table."""

import json
import re
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from tests import run
from tests.soak import resources
from tests.soak.faults import FAULTS, impossible
from tests.soak.soak import Soak

Report = dict[str, Any]
WIDTH = 30
REPORTS = Path(__file__).parents[1] / "soak_reports.json"
PAGE = REPORTS.with_name("SOAK.md")
_NUMBERS = re.compile(r"\[[-\d.,\s]+\]")
"""A list of numbers, which stays on one line."""


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


def table(reports: Sequence[Report]) -> str:
    """One column for each run."""
    rows: dict[str, Callable[[Report], Any]] = {
        "commit": itemgetter("commit"),
        "date": itemgetter("date"),
        "device": itemgetter("device"),
        "on": itemgetter("machine"),
        "seed": itemgetter("seed"),
        "time": lambda r: run.duration(r["seconds"]),
        "result": lambda r: r["result"].partition(":")[0],
        "updates": itemgetter("updates"),
        "faults": lambda r: sum(r["faults"].values()),
        **{f"- {name}": partial(_count, name) for name in FAULTS},
        "heals": itemgetter("heals"),
        "- of a quarantine": itemgetter("quarantines"),
        "requests refused in quarantine": itemgetter("requests refused in quarantine"),
        "tokens checked": itemgetter("tokens"),
        "tokens not of their version": itemgetter("mixed tokens"),
        "sequences of several versions": itemgetter("sequences of several versions"),
        "logprob difference, mean": lambda r: f"{r['difference']['mean']:.2f}",
        "- largest (bound)": lambda r: _bounded(r, "largest", "token"),
        "- mean of a segment (bound)": lambda r: _bounded(r, "largest segment mean", "segment"),
        "- from the version before": lambda r: f"{r['difference']['control mean']:.1f}",
        "- beyond the bound there": lambda r: f"{r['difference']['control told apart']:.1%}",
        **{
            f"growth of {name} (bound {bound:g})": partial(_grown, "growth", name)
            for name, bound in resources.BOUNDS.items()
        },
        **{
            f"slope of {name.removesuffix(' MiB')}, KiB an update (bound {bound:g})": partial(
                _grown, "slopes", name
            )
            for name, bound in resources.SLOPES.items()
        },
    }
    lines = [["SGLang", *(r["SGLang"] for r in reports)], ["---"] * (1 + len(reports))]
    lines += [[name, *map(cell, reports)] for name, cell in rows.items()]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _grown(how: str, name: str, report: Report) -> Any:
    return report.get(how, {}).get(name, "-")  # older reports have no slopes


def _count(name: str, report: Report) -> Any:
    if name in report["impossible"]:
        return f"not with it on a {report['device'].upper()}"
    return report["faults"].get(name, 0)


def _bounded(report: Report, name: str, bound: str) -> str:
    return f"{report['difference'][name]:.2f} ({report['bounds'][bound]:g})"


def record(reports: Sequence[Report]) -> None:
    """Put these in the place of the last ones of the same SGLang and device, and write the page."""
    kept = json.loads(REPORTS.read_text()) if REPORTS.exists() else {}
    for each in reports:
        told = {name: value for name, value in each.items() if name != "samples"}
        kept[f"{each['device']} {each['SGLang']}"] = told
    kept = dict(sorted(kept.items()))
    text = json.dumps(kept, indent=1)
    REPORTS.write_text(_NUMBERS.sub(lambda found: "".join(found[0].split()), text) + "\n")
    PAGE.write_text(f"# The last soak of each kind\n\n{table(list(kept.values()))}\n")


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
