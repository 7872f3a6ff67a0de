"""From the folder of a study to the rows of its result file.

    python -m benchmarks.parity.summary runs/parity
    python -m benchmarks.parity.summary rows.jsonl

A folder is one execution, on one machine; a file has the rows of one, which ``--output`` wrote
there. Of all studies but the first each execution is kept: the file's rows of others stay there.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.parity.dose_arms import ALL_ARMS
from benchmarks.parity.positions import POSITIONS
from benchmarks.parity.run_log import FAILED, FINISHED, HELD_OUT, LOG, Row, rows_of
from benchmarks.parity.scan import SCAN
from benchmarks.parity.settings import ENVIRONMENT, LAST_STEPS

RESULTS = Path(__file__).resolve().parents[1] / "results" / "parity.jsonl"
KEEPS_ALL = {"doses": "dose_response.jsonl", "long": "long_responses.jsonl"}
"""The file of each study of which all executions are kept."""
SERIES = (
    "reward",
    "mismatch_kl_k3",
    "ess",
    "clipped_fraction",
    "logprob_abs_diff_max",
    "entropy",
    "response_tokens",
    "position_16/mismatch_kl_k3",
    "position_64/mismatch_kl_k3",
    "position_256/mismatch_kl_k3",
)
"""What is kept of each step, where each has it."""
WARM_UP = 5
"""First steps of a run, whose times are left out."""


def summarize(state: Path) -> list[Row]:
    """Rows of kind environment, start, scan, positions, run, unevaluated, timing and failed.

    A run is finished and evaluated. What is not still has the rewards and the mismatch of its
    steps, which is all that is left of it where the machine is gone.
    """
    logs = {
        folder: rows
        for folder in sorted([*state.glob("*-*"), *state.glob("timing/*")])
        if _of("step", rows := rows_of(folder / LOG))
    }
    runs = [_run(folder, rows) for folder, rows in logs.items() if folder.parent == state]
    timings = [
        _timing(rows)
        for folder, rows in logs.items()
        if folder.parent != state and (folder / FINISHED).exists()
    ]
    headers = [rows[0] for rows in logs.values()]
    parameters = {ALL_ARMS[header["arm"]].model: header["parameters"] for header in headers}
    folders = sorted(state.glob("start-*"))
    starts = [
        {"kind": "start", **_start(folder), **_held_out(folder)}
        for folder in folders
        if (folder / HELD_OUT).exists()
    ]
    scans = [
        {"kind": "scan", **_start(folder), **_brief(row)}
        for folder in folders
        for row in rows_of(folder / SCAN)
    ]
    by_position = [
        {"kind": "positions", **_start(folder), **_brief(row)}
        for folder in folders
        for path in sorted(folder.glob(f"{POSITIONS}*"))
        for row in rows_of(path)
    ]
    environment = json.loads((state / ENVIRONMENT).read_text())
    rows = [
        {"kind": "environment", **environment, "parameters": parameters},
        *runs,
        *timings,
        *starts,
        *scans,
        *by_position,
        *({"kind": "failed", **row} for row in rows_of(state / FAILED)),
    ]
    return [row | {"execution": environment["date"]} for row in rows]


def _start(folder: Path) -> Row:
    _, model, *which = folder.name.split("-")
    return {"model": model, "start": int(which[0]) if which else 0}


def _held_out(folder: Path) -> Row:
    return {"held_out": json.loads((folder / HELD_OUT).read_text())}


def _run(folder: Path, rows: list[Row]) -> Row:
    header, engines = rows[0], _of("engine", rows)
    steps = _of("step", rows)
    last = steps[-LAST_STEPS:]
    is_evaluated = (folder / FINISHED).exists() and (folder / HELD_OUT).exists()
    return {
        "kind": "run" if is_evaluated else "unevaluated",
        "arm": header["arm"],
        "seed": header["seed"],
        "start": header.get("start", 0),
        "planted": header.get("planted"),
        "steps": len(steps),
        "engine_starts": len(engines),
        "matrices": engines[0]["matrices"],
        "fp8_matrices": engines[0]["fp8_matrices"],
        "last_reward": _short(fmean(row["reward"] for row in last)),
        "last_unfinished": _short(fmean(row["unfinished"] for row in last)),
        "evaluations": [[row["step"], _short(row["reward"])] for row in _of("evaluation", rows)],
        **(_held_out(folder) if is_evaluated else {}),
        "alarm_steps": sum(bool(row["alarms"]) for row in steps),
        "alarms": _alarms(steps),
        "decisions": [[row["step"], row["reason"]] for row in _of("decision", rows)],
        "series": {
            name: [_short(row[name]) for row in steps]
            for name in SERIES
            if all(name in row for row in steps)
        },
    }


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
    every = _of("step", rows)
    steps = every[WARM_UP:]
    times: dict[str, list[float]] = {
        "step_s": [row["update_s"] + row["rollout_s"] + row["learn_s"] for row in steps],
        **{name: [row[name] for row in steps] for name in ("rollout_s", "learn_s", "update_s")},
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
        },
    }


def _of(kind: str, rows: list[Row]) -> list[Row]:
    return [row for row in rows if row["kind"] == kind]


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _brief(value: Any) -> Any:
    """With its numbers cut to what is worth keeping."""
    if isinstance(value, dict):
        return {name: _brief(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_brief(each) for each in value]
    return _short(value) if isinstance(value, float) else value


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the result file from a study's folder.")
    parser.add_argument(
        "state", type=Path, help="the folder given to run_all as --state, or a file of its rows"
    )
    parser.add_argument("--output", type=Path, help="the study's file in benchmarks/results")
    args: Any = parser.parse_args(argv)
    rows = rows_of(args.state) if args.state.is_file() else summarize(args.state)
    name = KEEPS_ALL.get(rows[0]["options"].get("study"))
    output = args.output or (RESULTS.with_name(name) if name else RESULTS)
    if name:
        execution = rows[0]["execution"]
        rows = [*(row for row in rows_of(output) if row["execution"] != execution), *rows]
    output.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
    print(f"{output}: {sum(row['kind'] == 'run' for row in rows)} runs")


if __name__ == "__main__":
    main()
