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
    SHARE,
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
        lines.append(
            (
                arm.name,
                len(runs),
                f"{median(run['series']['mismatch_kl_k3'][0] for run in runs):.1e}",
                f"{median(k3 for run in runs for k3 in run['series']['mismatch_kl_k3']):.1e}",
                spread([run["held_out"]["reward"] for run in runs]),
                f"{fmean(run['evaluations'][0][1] for run in runs):.3f}",
                f"{fmean(run['last_reward'] for run in runs):.3f}",
                *_judged(found.get(arm.name), arm.predicted),
            )
        )
    head = (
        "arm | runs | k3, first step | k3, all steps | held-out reward "
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
    environments = [row for row in rows if row["kind"] == "environment"]
    starts = [row for row in rows if row["kind"] == "start"]
    e = environments[0]
    options = e["options"]
    begun = ", ".join(
        f"{row['model']} {row['start']} {row['held_out']['reward']:.3f}" for row in starts
    )
    executions = "; ".join(f"{row['date'][:16]} {where(row)}" for row in environments)
    return (
        f"{options['steps']} steps of {options['prompts']} problems of levels "
        f"{', '.join(map(str, options['levels']))} with {options['group']} responses each. Starts: "
        f'{begun}. Held-out rewards as in parity.md; means, least and largest. "worse": more than '
        f'{SHARE:.0%} of the reference\'s gain is lost, "same": less; one-sided, alpha '
        f"{ALPHA}.{_powers(found)} Open: a scan gave the dose a k3 of more than {FACTOR:g} times "
        f"its name, or less than 1/{FACTOR:g}. All executions: {executions}."
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
    """What was predicted for seeds 2 and 3 beside the verdicts on arms."""
    lines = [
        (each.predicted, len(each.runs), each.found if each.runs else "", each.agrees(rows))
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
        fired = [first_alarm(run) for run in runs.values()]
        verdict = found.get(arm.name)
        fell = [
            falls_at(run, theirs[key], verdict.margin) if verdict and key in theirs else None
            for key, run in runs.items()
        ]
        alarmed = sum(run["alarm_steps"] for run in runs.values())
        warned = sum(run["alarm_steps"] > 0 for run in runs.values())
        steps = sum(run["steps"] for run in runs.values())
        agrees = ""
        if arm.must_alarm is not None:
            agrees = "yes" if warned == len(runs) * arm.must_alarm else "no"
            agrees = OPEN if is_off_dose(rows, runs.values()) else agrees
        late = any(
            down is not None and (alarm is None or alarm > down)
            for alarm, down in zip(fired, fell, strict=True)
        )
        lines.append(
            (
                arm.name,
                f"{alarmed} of {steps}",
                ", ".join("never" if at is None else str(at) for at in fired),
                ", ".join("never" if at is None else str(at) for at in fell),
                agrees,
                "no" if late else "yes" if any(at is not None for at in fell) else "",
            )
        )
    head = (
        "arm | steps with an alarm | first alarm of each run | reward is lower from | alarms as "
        "predicted | alarm before that"
    )
    note = (
        f"Lower: from this step on the mean of the last {WINDOW} steps stays below the reference's "
        f"by more than the margin, by the runs' own engines; {WINDOW - 1} is the first step that "
        f"has such a mean. Empty: nothing was predicted, or no reward is lower."
    )
    return f"{table(head, lines)}\n\n{note}"


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
