"""From the logs of all runs to the rows of one result file: an environment, runs, timings."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, median

from benchmarks.parity.paths import FINISHED, JUDGED, LOG, TIMING, Row, rows_of
from benchmarks.parity.settings import LAST_STEPS
from benchmarks.parity.variants import ARMS

SERIES = (
    "reward",
    "mismatch_kl_k3",
    "ess",
    "clipped_fraction",
    "logprob_abs_diff_max",
    "entropy",
    "response_tokens",
)
"""What is kept of each step."""
TIMES = ("step_s", "rollout_s", "learn_s", "update_s")
DIGITS = 4
WARM_UP = 5
"""Steps at the begin of a run that are not timed."""
PLACE = ("device", "versions")
"""What of a run's header all runs have in common, beside their options."""


def summarize(states: Iterable[Path]) -> list[Row]:
    """All that the folders hold, as rows of kind environment, start, run, timing and unfinished.

    Raises:
        ValueError: there is no run, runs differ in more than arm and seed, or one comes twice.
    """
    rows: list[Row] = []
    headers: dict[str, Row] = {}
    timed: dict[str, Row] = {}
    for state in states:
        for log in sorted([*state.glob(f"*-*/{LOG}"), *state.glob(f"{TIMING}/*/{LOG}")]):
            found = rows_of(log)
            if not found or found[0]["kind"] != "run":
                continue
            is_timing = log.parent.parent.name == TIMING
            (timed if is_timing else headers)[log.parent.name] = found[0]
            rows.append(_timing(found) if is_timing else _run(log.parent, found))
        for judged in sorted(state.glob(f"start-*/{JUDGED}")):
            model = judged.parent.name.split("-")[1]
            rows.append({"kind": "start", "model": model, "judged": _judged(judged.parent)})
    if not headers:
        raise ValueError("no folder holds a run; give what run_all.py got as --state")
    names = Counter((row["kind"], row.get("arm"), row.get("seed")) for row in rows if "arm" in row)
    if twice := [f"{arm}-{seed}" for (_, arm, seed), count in names.items() if count > 1]:
        raise ValueError(f"more than one folder has {', '.join(twice)}; give each run once")
    return [_environment(headers, timed), *rows]


def write(path: Path, rows: list[Row]) -> None:
    """A line a row, without spaces."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, separators=(",", ":")) for row in rows]
    path.write_text("\n".join(lines) + "\n")


def read(text: str) -> list[Row]:
    """What ``write`` wrote."""
    return [json.loads(line) for line in text.splitlines()]


def _environment(headers: dict[str, Row], timed: dict[str, Row]) -> Row:
    """What all runs depend on, timed ones as well.

    Raises:
        ValueError: they do not.
    """
    starts: dict[str, str] = {}
    facts = _facts(next(iter(headers.values())))
    for name, header in headers.items():
        _check(name, facts, _facts(header))
        model, start = ARMS[header["arm"]].model, header["options"]["start"]
        if starts.setdefault(model, start) != start:
            raise ValueError(
                f"{name} began with other weights than other runs of the {model} model, so they "
                f"are no pairs; merge runs of one machine's start"
            )
    for name, header in timed.items():
        _check(f"{TIMING}/{name}", facts, _facts(header) | {"steps": facts["steps"]})
    dates = sorted(header["date"][:10] for header in headers.values())
    return {
        "kind": "environment",
        **{key: facts.pop(key) for key in (*PLACE, "commit")},
        "options": facts,
        "starts": starts,
        "parameters": {ARMS[h["arm"]].model: h["parameters"] for h in headers.values()},
        "date": dates[-1],
    }


def _facts(header: Row) -> Row:
    """What a run has in common with others; the start is of a model."""
    options = {key: value for key, value in header["options"].items() if key != "start"}
    return {key: header[key] for key in PLACE} | options


def _check(name: str, facts: Row, mine: Row) -> None:
    if changed := [key for key in facts | mine if facts.get(key) != mine.get(key)]:
        raise ValueError(
            f"{name} differs from other runs in {', '.join(changed)}; merge one experiment"
        )


def _run(folder: Path, rows: list[Row]) -> Row:
    header, steps = rows[0], [row for row in rows if row["kind"] == "step"]
    common = {"arm": header["arm"], "seed": header["seed"], "steps": len(steps)}
    if not (folder / FINISHED).exists():
        return {"kind": "unfinished", **common}
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    engines = [row for row in rows if row["kind"] == "engine"]
    return {
        "kind": "run",
        **common,
        "engine_starts": len(engines),
        "matrices": engines[0]["matrices"],
        "fp8_matrices": engines[0]["fp8_matrices"],
        "last_reward": _short(fmean(row["reward"] for row in steps[-LAST_STEPS:])),
        "last_unfinished": _short(fmean(row["unfinished"] for row in steps[-LAST_STEPS:])),
        "evaluations": [[row["step"], _short(row["reward"])] for row in evaluations],
        "judged": _judged(folder),
        "alarm_steps": sum(bool(row["alarms"]) for row in steps),
        "alarms": _alarms(steps),
        "series": {
            name: [_short(row.get(name)) for row in steps]
            for name in SERIES
            if any(name in row for row in steps)
        },
    }


def _judged(folder: Path) -> Row | None:
    path = folder / JUDGED
    return json.loads(path.read_text()) if path.exists() else None


def _alarms(steps: list[Row]) -> Row:
    """By metric: how often, when first, and the row of the step with the worst value."""
    fired: dict[str, list[Row]] = defaultdict(list)
    for row in steps:
        for alarm in row["alarms"]:
            fired[alarm["metric"]].append(alarm | {"step": row["step"]})
    return {
        metric: {
            "count": len(found),
            "first_step": found[0]["step"],
            **max(found, key=lambda alarm: abs(alarm["value"] - alarm["threshold"])),
        }
        for metric, found in sorted(fired.items())
    }


def _timing(rows: list[Row]) -> Row:
    every = [row for row in rows if row["kind"] == "step"]
    steps = every[WARM_UP:]
    times: dict[str, list[float]] = {
        "step_s": [row["update_s"] + row["rollout_s"] + row["learn_s"] for row in steps],
        **{name: [row[name] for row in steps] for name in TIMES[1:]},
        "tokens_per_s": [row["tokens"] / row["rollout_s"] for row in steps],
    }
    return {
        "kind": "timing",
        "arm": rows[0]["arm"],
        "seed": rows[0]["seed"],
        "n": len(steps),
        "steps": len(every),
        "alarm_steps": sum(bool(row["alarms"]) for row in every),
        **{
            name: {"median": _short(median(v)), "min": _short(min(v)), "max": _short(max(v))}
            for name, v in times.items()
            if v
        },
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")
