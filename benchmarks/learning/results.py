"""What the runs of a study found: its rows, and a table of each arm beside the reference.

    python -m benchmarks.learning.results runs/learning --output learning.jsonl
    python -m benchmarks.learning.results learning.jsonl other_machine.jsonl

Rewards are of the final weights in one BF16 engine, paired by execution and seed. An arm is worse
where it loses more than SHARE of what the reference has learned, and the same where it loses less:
one-sided paired t tests at ALPHA each. The control has to be worse: if it is not, the runs could
not have seen a loss.
"""

import argparse
import json
import math
from pathlib import Path
from statistics import fmean, median, stdev

from benchmarks.learning.run import HELD_OUT, Row, rows_of
from benchmarks.learning.study import ARMS, CONTROL, ENVIRONMENT, LOG, REFERENCE
from benchmarks.tables.markdown import grid, joined

SHARE, ALPHA = 0.2, 0.05
K3 = "mismatch_kl_k3"
POSITIONS = 16, 64, 256
"""First tokens of the ranges of positions that ``trainer_bridge.correct`` reports."""
SERIES = ("reward", "ess", "entropy", K3, *(f"position_{first}/{K3}" for first in POSITIONS))
"""What is kept of each step, where each has it."""
LAST_STEPS = 20


def summarize(state: Path) -> list[Row]:
    """A row of the environment, one of the start, and one of each run that has a step."""
    environment = json.loads((state / ENVIRONMENT).read_text())
    rows: list[Row] = [{"kind": "environment", **environment}]
    for path in sorted(state.glob(f"*/{LOG}")):
        logged = rows_of(path)
        steps = [row for row in logged if row["kind"] == "step"]
        series = {
            key: [float(f"{row[key]:.4g}") for row in steps]
            for key in SERIES
            if all(key in row for row in steps)
        }
        alarms = {row["step"]: row["alarms"] for row in steps if row["alarms"]}
        if steps:
            kept = {"alarms": alarms, "series": series, **_held_out(path.parent)}
            rows.append({"kind": "run", "arm": logged[0]["arm"], "seed": logged[0]["seed"], **kept})
    rows.append({"kind": "start", **_held_out(state / "start")})
    return [row | {"execution": environment["date"]} for row in rows]


def _held_out(folder: Path) -> Row:
    path = folder / HELD_OUT
    return {"held_out": json.loads(path.read_text())} if path.exists() else {}


def compare(ours: list[float], theirs: list[float], gained: float) -> tuple[str, ...]:
    """Cells about pairs: their number, the share of the gain that is lost, the interval of the mean
    difference at confidence 1 - 2 ALPHA, and what that says."""
    from scipy.stats import t  # type: ignore[import-untyped]

    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean, n, margin = fmean(differences), len(differences), SHARE * gained
    if gained <= 0:
        return str(n), "", "", "undecided: the reference has learned nothing"
    share = f"{-mean / gained:.0%}"
    if n == 1:
        return "1", share, "", "undecided"
    half = t.ppf(1 - ALPHA, n - 1) * stdev(differences) / math.sqrt(n)
    found = "worse" if mean + half < -margin else "same" if mean - half > -margin else "undecided"
    return str(n), share, f"{mean - half:+.3f} to {mean + half:+.3f}", found


def table(rows: list[Row]) -> str:
    """A line for each arm, what the control says, and the executions."""
    runs = {(r["execution"], r["arm"], r["seed"]): r for r in rows if r["kind"] == "run"}
    begun = {r["execution"]: _reward(r) for r in rows if r["kind"] == "start"}
    lines, found = [], {}
    for arm in [name for name in ARMS if any(name == key[1] for key in runs)]:
        mine = {key: run for key, run in runs.items() if key[1] == arm}
        pairs = [
            (ours, theirs, theirs - start)
            for (execution, _, seed), run in mine.items()
            if (ours := _reward(run)) is not None
            and (theirs := _reward(runs.get((execution, REFERENCE, seed), {}))) is not None
            and (start := begun.get(execution)) is not None
        ]
        cells: tuple[str, ...] = ("", "", "", "")
        if arm != REFERENCE and pairs:
            ours_of, theirs_of, gains = (list(column) for column in zip(*pairs, strict=True))
            cells = compare(ours_of, theirs_of, fmean(gains))
        found[arm] = cells[-1]
        rewards = [reward for run in mine.values() if (reward := _reward(run)) is not None]
        series = [run["series"] for run in mine.values()]
        last = fmean(fmean(each["reward"][-LAST_STEPS:]) for each in series)
        alarms = sum(len(run["alarms"]) for run in mine.values())
        lines.append(
            [
                arm,
                str(len(mine)),
                f"{fmean(rewards):.3f}" if rewards else "",
                *cells,
                f"{last:.3f}",
                *(_median([v for each in series for v in each.get(k, [])]) for k in SERIES[3:]),
                f"{alarms} of {sum(len(each['reward']) for each in series)}",
            ]
        )
    head = ["arm", "runs", "held-out reward", "pairs", "lost, of the gain", "90% interval", "found"]
    head += [f"own engine, last {LAST_STEPS} steps", "k3"]
    head += [f"k3 from token {first}" for first in POSITIONS] + ["steps with an alarm"]
    seen = found.get(CONTROL) or "not there"
    says = "a loss is seen" if seen == "worse" else "a loss may not have been seen"
    where = [_where(row) for row in rows if row["kind"] == "environment"]
    return joined(grid(head, lines), f"`{CONTROL}`: {seen}; {says}. Medians of steps.", *where)


def _reward(row: Row) -> float | None:
    return row["held_out"]["reward"] if "held_out" in row else None


def _median(values: list[float]) -> str:
    return f"{median(values):.1e}" if values else ""


def _where(row: Row) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
    return f"{row['date'][:16]}: {row['device']}, {versions}, commit {row['commit']}."


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Print the table of a study.")
    parser.add_argument("sources", type=Path, nargs="+", help="folders of runs, or files of rows")
    parser.add_argument("--output", type=Path, help="JSONL file for the rows")
    args = parser.parse_args(argv)
    rows = [r for each in args.sources for r in (summarize if each.is_dir() else rows_of)(each)]
    if args.output:
        args.output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(table(rows))


if __name__ == "__main__":
    main()
