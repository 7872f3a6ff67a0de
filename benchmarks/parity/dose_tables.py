"""The tables of docs/dose_response.md, from the rows of results/dose_response.jsonl."""

import re
from itertools import pairwise
from statistics import fmean, median

from benchmarks.parity.comparison import Comparison, powers
from benchmarks.parity.dose_arms import DOSE_ARMS
from benchmarks.parity.dose_points import points
from benchmarks.parity.dose_verdict import (
    FACTOR,
    OPEN,
    SEEDS,
    SHARE,
    STARTS,
    WINDOW,
    Verdict,
    falls_at,
    first_alarm,
    is_off_dose,
    mitigated,
    runs_of,
    verdicts,
)
from benchmarks.parity.run_log import Row
from benchmarks.parity.scan import nearest
from benchmarks.parity.settings import ALPHA, LAST_STEPS
from benchmarks.parity.tables import interval, percent, spread, table, where

LAYERS = re.compile(r"'[^']*'")
"""Of a decision: the names that follow an option."""


def scans(rows: list[Row]) -> str:
    """What each gain did to the mismatch of a start, and which were chosen."""
    found: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        if row["kind"] == "scan":
            found.setdefault((row["execution"], row["model"], row["start"]), []).append(row)
    lines = []
    for (execution, model, start), mine in found.items():
        unplanted = next(row for row in mine if not row["exponent"])
        doses = {arm.dose for arm in DOSE_ARMS.values() if arm.model == model and arm.dose}
        chosen = [(dose, nearest(mine, dose)) for dose in sorted(doses)]
        planted = [row["mismatch_kl_k3"] for row in mine if row["exponent"]]
        rising = sum(a <= b for a, b in pairwise(planted))
        lines.append(
            (
                execution[:16],
                f"{model}, {start}",
                f"{unplanted['mismatch_kl_k3']:.1e}",
                "; ".join(f"{dose:g}: {_gain(row)}" for dose, row in chosen),
                f"{rising} of {len(planted) - 1}",
            )
        )
    head = "execution | model, start | unplanted | dose: gain, k3 | steps of the scan that rise"
    return f"{table(head, lines)}\n\nLeft: of k3, where the trainer computes by `fp8_forward`."


def _gain(row: Row) -> str:
    channels = "each" if row["every"] == 1 else "every second"
    left = row.get("fp8_forward/mismatch_kl_k3")
    of_it = "" if left is None else f" ({left:.1e} left)"
    return f"2^{row['exponent']} in {channels} group, {row['mismatch_kl_k3']:.1e}{of_it}"


def response(rows: list[Row]) -> str:
    """Each arm beside its reference, what was predicted and what was found."""
    found = verdicts(rows)
    lines = []
    for arm in DOSE_ARMS.values():
        runs = list(runs_of(rows, arm.name).values())
        if not runs:
            continue
        verdict = found.get(arm.name)
        lines.append(
            (
                arm.name,
                len(runs),
                len(verdict.comparison.differences) if verdict else "",
                f"{median(run['series']['mismatch_kl_k3'][0] for run in runs):.1e}",
                f"{median(k3 for run in runs for k3 in run['series']['mismatch_kl_k3']):.1e}",
                spread([run["held_out"]["reward"] for run in runs]),
                f"{fmean(run['evaluations'][0][1] for run in runs):.3f}",
                f"{fmean(run['last_reward'] for run in runs):.3f}",
                *_judged(verdict, arm.predicted),
            )
        )
    head = (
        "arm | runs | pairs | k3, first step | k3, all steps | held-out reward "
        f"| first evaluation, own engine | training, last {LAST_STEPS} steps | lost, of the gain "
        f"| {1 - 2 * ALPHA:.0%} interval of the difference | predicted | found | as predicted"
    )
    return f"{table(head, lines)}\n\n{_note(rows, found)}"


def _judged(verdict: Verdict | None, predicted: str | None) -> list[str]:
    if verdict is None:
        return [""] * 5
    decided = predicted is not None and verdict.is_settled and verdict.found != "undecided"
    agrees = ("yes" if verdict.found == predicted else "no") if decided else ""
    if verdict.is_off_dose:
        agrees = OPEN
    return [
        percent(verdict.loss),
        interval(verdict.comparison),
        predicted or "",
        verdict.found,
        agrees,
    ]


def _note(rows: list[Row], found: dict[str, Verdict]) -> str:
    rules = (
        f"Held-out rewards as in parity.md; means, least and largest. Pairs: runs whose reference "
        f'and start were evaluated. "worse": more than {SHARE:.0%} of the reference\'s gain is '
        f'lost, "same": less; one-sided, alpha {ALPHA}.{_powers(found)} As predicted: empty where '
        f"a prediction is undecided, or has fewer than {SEEDS} seeds over {STARTS} starts; open: "
        f"a scan gave the dose a k3 of more than {FACTOR:g} times its name, or less than "
        f"1/{FACTOR:g}."
    )
    executions = [_execution(rows, row) for row in rows if row["kind"] == "environment"]
    return "\n\n".join([rules, *executions])


def _execution(rows: list[Row], environment: Row) -> str:
    """Settings and starts of an execution, and which of its runs have no held-out reward."""
    options = environment["options"]
    mine = [row for row in rows if row["execution"] == environment["execution"]]
    starts = (
        f"{row['model']} {row['start']} {row['held_out']['reward']:.3f}"
        for row in mine
        if row["kind"] == "start"
    )
    lost = [
        f"{row['arm']}-{row['seed']} ({row['steps']} of {options['steps']} steps)"
        for row in mine
        if row["kind"] == "unevaluated"
    ]
    done = {f"{row['arm']}-{row['seed']}" for row in mine if row["kind"] == "run"}
    failed = {row["job"]: row["status"] for row in mine if row["kind"] == "failed"}
    jobs = [
        f"{job} (status {status}{', then done' if job in done else ''})"
        for job, status in failed.items()
    ]
    return (
        f"{environment['date'][:16]}: {options['steps']} steps of {options['prompts']} problems of "
        f"levels {', '.join(map(str, options['levels']))} with {options['group']} responses each. "
        f"Starts: {', '.join(starts)}. Not evaluated: {', '.join(lost) or 'none'}. Failed jobs: "
        f"{', '.join(jobs) or 'none'}. {where(environment)}."
    )


def _powers(found: dict[str, Verdict]) -> str:
    """A sentence for each number of pairs that arms have."""
    by_pairs: dict[int, list[tuple[float, float]]] = {}
    for each in found.values():
        if each.comparison.spread is not None:
            pairs = len(each.comparison.differences)
            by_pairs.setdefault(pairs, []).append((each.comparison.spread, each.margin))
    sentences = ""
    for pairs, measured in sorted(by_pairs.items(), reverse=True):
        middle, margin = map(median, zip(*measured, strict=True))
        worse, _ = powers(middle, pairs, margin, 2 * ALPHA)
        _, same = powers(middle, pairs, margin, ALPHA)
        sentences += (
            f" With {pairs} pairs ({len(measured)} arms) whose differences spread by {middle:.3f}, "
            f"the median, a loss of twice the margin is found in {worse:.0%} of experiments, and "
            f"no loss in at least {same:.0%}."
        )
    return sentences


def mitigations(rows: list[Row]) -> str:
    """What corrections, ``fp8_forward`` and the controller recover."""
    lines = [
        (arm, len(bf16.differences), _difference(bf16), _difference(own))
        for arm, (bf16, own) in mitigated(rows).items()
    ]
    head = (
        "arm, less the same dose uncorrected | pairs | held-out reward, BF16 engine "
        f"| training, last {LAST_STEPS} steps, own engine"
    )
    return f"{table(head, lines)}\n\nMeans of the differences, {1 - 2 * ALPHA:.0%} intervals."


def added(rows: list[Row]) -> str:
    """What was predicted beside the verdicts on arms."""
    lines = [
        (each.predicted, each.seeds, each.found if each.runs else "", each.agrees(rows))
        for each in points(rows)
    ]
    return table("prediction | seeds | found | as predicted", lines)


def _difference(found: Comparison) -> str:
    return f"{found.mean:+.3f}" + (f" ({interval(found)})" if found.interval else "")


def alarms(rows: list[Row]) -> str:
    """When alarms fired, and when rewards fell."""
    found = verdicts(rows)
    lines = []
    for arm in DOSE_ARMS.values():
        runs, theirs = runs_of(rows, arm.name), runs_of(rows, arm.reference or "")
        if not runs:
            continue
        fired = {key: first_alarm(run) for key, run in runs.items()}
        verdict = found.get(arm.name)
        fell = {
            key: falls_at(run, theirs[key], verdict.margin)
            for key, run in runs.items()
            if verdict and key in theirs
        }
        alarmed = sum(run["alarm_steps"] for run in runs.values())
        warned = sum(run["alarm_steps"] > 0 for run in runs.values())
        steps = sum(run["steps"] for run in runs.values())
        agrees = ""
        if arm.must_alarm is not None:
            agrees = "yes" if warned == len(runs) * arm.must_alarm else "no"
            agrees = OPEN if is_off_dose(rows, runs.values()) else agrees
        late = any(
            down is not None and ((alarm := fired[key]) is None or alarm > down)
            for key, down in fell.items()
        )
        lines.append(
            (
                arm.name,
                f"{alarmed} of {steps}",
                ", ".join(map(_at, fired.values())),
                ", ".join(_at(fell[key]) if key in fell else "-" for key in runs),
                agrees,
                "no" if late else "yes" if any(at is not None for at in fell.values()) else "",
            )
        )
    head = (
        "arm | steps with an alarm | first alarm of each run | reward is lower from | alarms as "
        "predicted | alarm no later than that"
    )
    note = (
        f"Reward (of the runs' own engines) is lower where its mean over {WINDOW} steps stays "
        f"below the reference's by more than the margin until the end; the step given is the first "
        f'one below in the first such window. "-" marks a run without a reference or without an '
        f"evaluated start. A cell is empty where nothing was predicted or no reward fell."
    )
    return f"{table(head, lines)}\n\n{note}"


def _at(step: int | None) -> str:
    return "never" if step is None else str(step)


def decisions(rows: list[Row]) -> str:
    """What the controllers decided."""
    runs = runs_of(rows, "grows-controlled")
    lines = [
        (execution[:16], seed, step, LAYERS.sub(_count, reason))
        for (execution, seed), run in runs.items()
        for step, reason in run["decisions"]
    ]
    return table("execution | seed | step | decision", lines)


def _count(names: re.Match[str]) -> str:
    return f"[{len(names.group().split())} layers]"


BLOCKS = {
    "dose_scans": ("dose_response.jsonl", scans),
    "dose_response": ("dose_response.jsonl", response),
    "dose_added": ("dose_response.jsonl", added),
    "dose_mitigations": ("dose_response.jsonl", mitigations),
    "dose_alarms": ("dose_response.jsonl", alarms),
    "dose_decisions": ("dose_response.jsonl", decisions),
}
"""The file that each block is made from, and how."""
