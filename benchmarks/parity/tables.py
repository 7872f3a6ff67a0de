"""The tables of docs/parity.md, from the rows of results/parity.jsonl."""

from collections.abc import Iterable, Sequence
from statistics import fmean, median, stdev

from benchmarks.parity.arms import ARMS
from benchmarks.parity.comparison import Comparison, powers
from benchmarks.parity.models import PRETRAINED
from benchmarks.parity.run_log import Row
from benchmarks.parity.settings import ALPHA, LAST_STEPS, MARGIN
from benchmarks.parity.verdict import (
    at_most,
    comparisons,
    held_out_rewards,
    learning,
    runs_by_arm,
)


def rewards(rows: list[Row]) -> str:
    """Final rewards of each arm, and how they were measured."""
    lines = [
        (
            arm,
            len(runs),
            spread([run["held_out"]["reward"] for run in runs]),
            spread([run["last_reward"] for run in runs]),
            spread([run["evaluations"][0][1] for run in runs]),
            spread([run["evaluations"][-1][1] for run in runs]),
            f"{sum(run['alarm_steps'] for run in runs)} of {sum(run['steps'] for run in runs)}",
        )
        for arm, runs in runs_by_arm(rows).items()
    ]
    head = (
        f"arm | seeds | held-out reward | last {LAST_STEPS} steps | own engine at the start "
        f"| own engine at the end | steps with an alarm"
    )
    starts = [
        f"The {row['model']} model begins at {row['held_out']['reward']:.3f} (held out)."
        for row in rows
        if row["kind"] == "start"
    ]
    e = rows[0]
    models = " and ".join(f"{n / 1e6:.0f} M parameters ({m})" for m, n in e["parameters"].items())
    options = e["options"]
    size = f" --size {PRETRAINED}" if options.get("size") == PRETRAINED else ""
    note = (
        f"`python -m benchmarks.parity.run_all{size}`: {models}, {options['steps']} steps of "
        f"{options['prompts']} problems with {options['group']} responses each, {where(e)}, "
        f"{e['date'][:10]}. Means over seeds, least and largest. Held-out reward: on "
        f"{options['held_out_problems']} held-out problems, one response each, by one BF16 engine "
        f"for the arms of a seed."
    )
    return "\n".join([table(head, lines), "", *starts, note])


def tests(rows: list[Row]) -> str:
    """Each arm minus its reference."""
    found, held_out = comparisons(rows), held_out_rewards(rows)
    lines = []
    for arm, comparison in found.items():
        reference = ARMS[arm].reference or ""
        theirs = held_out[reference].values()
        inside = min(theirs) <= fmean(held_out[arm].values()) <= max(theirs)
        name, seeds = f"{arm} minus {reference}", len(comparison.differences)
        lines.append((name, seeds, *_tested(comparison, inside)))
    head = (
        "arm minus reference | seeds | difference | 90% interval | within reference's seeds "
        "| no difference: t, permutation | equivalent: TOST | power: t, TOST"
    )
    spreads = [
        f"{arm} {stdev(rewards.values()):.3f}"
        for arm, rewards in held_out.items()
        if ARMS[arm].reference is None
    ]
    most = max(found.values(), key=lambda comparison: len(comparison.differences))
    differ = [
        f"{arm} ({comparison.mean:+.3f})"
        for arm, comparison in found.items()
        if comparison.p_t is not None and comparison.p_t < ALPHA
    ]
    note = (
        f"Held-out rewards, paired by seed; margin {MARGIN} and alpha {ALPHA} were fixed before "
        f"the runs. Standard deviation of the references' seeds: {', '.join(spreads)}. "
        f"Power: the chance of the t test to find a difference of the margin, and of TOST to find "
        f"none, at the spread that was seen. The permutation test cannot give less than "
        f"{most.least_p_permutation:.2g} with {len(most.differences)} seeds. The t test found a "
        f"difference in {', '.join(differ) or 'no arm'}."
    )
    return f"{table(head, lines)}\n\n{note}"


def mismatch(rows: list[Row]) -> str:
    """How far rollout and trainer are apart, by arm."""
    lines = []
    for arm, runs in runs_by_arm(rows).items():
        kl, ess, worst, clipped, length = (
            [value for run in runs for value in run["series"].get(name, [])]
            for name in (
                "mismatch_kl_k3",
                "ess",
                "logprob_abs_diff_max",
                "clipped_fraction",
                "response_tokens",
            )
        )
        cut = fmean(run["last_unfinished"] for run in runs)
        entropy = (fmean(run["series"]["entropy"][i] for run in runs) for i in (0, -1))
        lines.append(
            (
                arm,
                f"{median(kl):.1e} (to {max(kl):.1e})",
                f"{median(ess):.4f} (from {min(ess):.4f})",
                f"{median(worst):.2f} (to {max(worst):.1f})",
                f"{fmean(clipped):.1e}" if clipped else "",
                " to ".join(f"{value:.2f}" for value in entropy),
                f"{median(length):.0f}, {cut:.1%} at the end",
            )
        )
    head = (
        "arm | mismatch KL (k3, nats) | ESS | worst token (nats) | tokens above C = 2 "
        "| entropy (nats) | response tokens, cut off"
    )
    note = (
        f"KL, ESS, worst token (its logprobs' difference), response tokens: medians over all "
        f"steps and seeds, in brackets the worst step. Tokens above C: their mean fraction. "
        f"Entropy: first step to last, means over seeds. Cut off: of the last {LAST_STEPS} steps."
    )
    return f"{table(head, lines)}\n\n{note}"


def alarms(rows: list[Row]) -> str:
    """Which alarms fired in which arm, and whether they were to."""
    lines: list[Sequence[object]] = []
    for arm, runs in runs_by_arm(rows).items():
        steps = sum(run["steps"] for run in runs)
        fired = sorted({metric for run in runs for metric in run["alarms"]})
        expected = _yes(bool(fired) == ARMS[arm].must_alarm)
        if not fired:
            lines.append((arm, "none", f"0 of {steps}", "", "", "", expected))
        for metric in fired:
            mine = [run["alarms"][metric] for run in runs if metric in run["alarms"]]
            worst = max(mine, key=lambda a: abs(a["value"] - a["threshold"]))
            lines.append(
                (
                    arm,
                    f"`{metric}`",
                    f"{sum(a['count'] for a in mine)} of {steps}",
                    min(a["first_step"] for a in mine),
                    f"{worst['value']:.3g}",
                    f"{worst['threshold']:.3g}",
                    expected,
                )
            )
    broken = ", ".join(f"`{arm.name}`" for arm in ARMS.values() if arm.must_alarm)
    head = "arm | alarm | steps | first | worst value | threshold | as expected"
    note = f"Expected: alarms in {broken}, which is broken, and no other."
    return f"{table(head, lines)}\n\n{note}"


def timing(rows: list[Row]) -> str:
    """Wall time of a step, each arm alone on a GPU."""
    timed = {row["arm"]: row for row in rows if row["kind"] == "timing"}
    lines = [
        (
            arm,
            f"{row['step_s']['median']:.2f} s ({row['step_s']['min']:.2f} to "
            f"{row['step_s']['max']:.2f})",
            f"{row['rollout_s']['median']:.2f} s",
            f"{row['tokens_per_s']['median']:,.0f}",
            f"{row['learn_s']['median']:.2f} s",
            f"{1e3 * row['update_s']['median']:.1f} ms",
            f"{row['alarm_steps']} of {row['steps']}",
        )
        for arm, row in timed.items()
    ]
    steps = max(row["n"] for row in timed.values())
    note = (
        f"`python -m benchmarks.parity.run_all --timing`: medians of {steps} steps, one run alone "
        f"on a GPU, {where(rows[0])}. Correction and metrics are part of the training, and the "
        f"same in every arm."
    )
    head = "arm | step | rollout | tokens/s | training | update | steps with an alarm"
    return f"{table(head, lines)}\n\n{note}"


BLOCKS = {
    "parity": ("parity.jsonl", rewards),
    "parity_tests": ("parity.jsonl", tests),
    "parity_mismatch": ("parity.jsonl", mismatch),
    "parity_alarms": ("parity.jsonl", alarms),
    "parity_timing": ("parity.jsonl", timing),
    "headline_learning": ("parity.jsonl", learning),
    "pretrained_rewards": ("pretrained_grpo.jsonl", rewards),
    "pretrained_tests": ("pretrained_grpo.jsonl", tests),
    "pretrained_mismatch": ("pretrained_grpo.jsonl", mismatch),
    "headline_pretrained": ("pretrained_grpo.jsonl", learning),
}
"""The file that each block is made from, and how."""


def table(head: str, lines: Iterable[Sequence[object]]) -> str:
    """Markdown; ``head``: the names of the columns, with bars between them."""
    rows = [f"| {' | '.join(map(str, line))} |" for line in lines]
    return "\n".join([f"| {head} |", "|---" * (head.count("|") + 1) + "|", *rows])


def interval(found: Comparison) -> str:
    """That of a mean difference; empty for a single pair."""
    return "{:+.3f} to {:+.3f}".format(*found.interval) if found.interval else ""


def percent(part: float | None) -> str:
    """Empty where there is none."""
    return "" if part is None else f"{part:.0%}"


def _tested(found: Comparison, inside: bool) -> list[str]:
    """Cells of the table of tests; a single seed cannot be tested."""
    mean = f"{found.mean:+.3f}" if round(found.mean, 3) else "0.000"
    if found.interval is None or found.spread is None or found.p_t is None or found.p_tost is None:
        return [mean, "", _yes(inside), "", "", ""]
    of_t, of_tost = powers(found.spread, len(found.differences), MARGIN, ALPHA)
    return [
        mean,
        interval(found),
        _yes(inside),
        f"p = {found.p_t:.2f}, {found.p_permutation:.2f}",
        f"{_yes(found.p_tost < ALPHA)}, p {at_most(found.p_tost)}",
        f"{of_t:.0%}, {of_tost:.0%}",
    ]


def spread(values: Sequence[float]) -> str:
    """Mean, least and largest."""
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def where(e: Row) -> str:
    """Device, versions and commit of an execution."""
    versions = ", ".join(f"{name} {version}" for name, version in e["versions"].items())
    return f"{e['device']}, {versions}, commit {e['commit']}"


def _yes(truth: bool) -> str:
    return "yes" if truth else "no"
