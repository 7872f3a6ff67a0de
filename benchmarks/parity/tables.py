"""The measured blocks of docs/parity.md, from the rows of the result file."""

import math
from collections.abc import Sequence
from statistics import fmean, median, stdev

from benchmarks.parity import summary
from benchmarks.parity.comparison import Comparison, compare, powers
from benchmarks.parity.paths import Row
from benchmarks.parity.settings import ALPHA, LAST_STEPS, MARGIN
from benchmarks.parity.variants import ARMS

PICTURE = "parity.png"


def rewards(text: str) -> str:
    """The picture, final rewards of each arm, and how they were measured."""
    rows = summary.read(text)
    lines = [
        f"![Reward, mismatch KL, ESS and clipped fraction over steps, by arm]({PICTURE})",
        "",
        f"| arm | seeds | held-out reward | last {LAST_STEPS} steps | own engine at the end "
        f"| steps with an alarm |",
        "|---|---|---|---|---|---|",
    ]
    for arm, runs in _arms(rows).items():
        cells = [
            arm,
            str(len(runs)),
            _spread([run["judged"]["reward"] for run in runs if run["judged"]]),
            _spread([run["last_reward"] for run in runs]),
            _spread([run["evaluations"][-1][1] for run in runs]),
            f"{sum(run['alarm_steps'] for run in runs)} of {sum(run['steps'] for run in runs)}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    starts = [row for row in rows if row["kind"] == "start" and row["judged"]]
    lines += ["", *(_before(start) for start in starts), _how(rows)]
    return "\n".join(lines)


def tests(text: str) -> str:
    """Each arm minus its reference."""
    rows = summary.read(text)
    lines = [
        "| arm minus reference | seeds | difference | 90% interval | within reference's seeds "
        "| no difference: t, permutation | equivalent: TOST | power: t, TOST |",
        "|---|---|---|---|---|---|---|---|",
    ]
    found = comparisons(rows)
    judged = judged_rewards(rows)
    for arm, comparison in found.items():
        reference = ARMS[arm].reference
        theirs = judged[reference].values()
        inside = min(theirs) <= fmean(judged[arm].values()) <= max(theirs)
        seeds = len(comparison.differences)
        lines.append(f"| {arm} minus {reference} | {seeds} | {_tested(comparison, inside)} |")
    lines += ["", _legend(judged, found)]
    return "\n".join(lines)


def judged_rewards(rows: list[Row]) -> dict[str, dict[int, float]]:
    """By arm and seed, of finished runs that were judged, in the order of the arms."""
    return {
        arm: {run["seed"]: run["judged"]["reward"] for run in runs if run["judged"]}
        for arm, runs in _arms(rows).items()
    }


def comparisons(rows: list[Row]) -> dict[str, Comparison]:
    """Each arm beside its reference, where a seed of both was judged."""
    judged = judged_rewards(rows)
    found = {}
    for arm, mine in judged.items():
        theirs = judged.get(ARMS[arm].reference or "", {})
        if both := sorted(mine.keys() & theirs.keys()):
            pair = [mine[seed] for seed in both], [theirs[seed] for seed in both]
            found[arm] = compare(*pair, MARGIN, ALPHA)
    return found


def mismatch(text: str) -> str:
    """How far rollout and trainer are apart, by arm."""
    lines = [
        "| arm | mismatch KL (k3, nats) | ESS | worst token (nats) | tokens above C = 2 "
        "| entropy (nats) | response tokens, cut off |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, runs in _arms(summary.read(text)).items():
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
        cells = [
            arm,
            f"{median(kl):.1e} (to {max(kl):.1e})",
            f"{median(ess):.4f} (from {min(ess):.4f})",
            f"{median(worst):.2f} (to {max(worst):.1f})",
            f"{fmean(clipped):.1e}" if clipped else "",
            " to ".join(f"{fmean(r['series']['entropy'][i] for r in runs):.2f}" for i in (0, -1)),
            f"{median(length):.0f}, {cut:.1%} at the end",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    note = (
        f"KL, ESS, worst token (its logprobs' difference), response tokens: medians over all "
        f"steps and seeds, in brackets the worst step. Tokens above C: their mean fraction. "
        f"Entropy: first step to last, means over seeds. Cut off: of the last {LAST_STEPS} steps."
    )
    return "\n".join([*lines, "", note])


def alarms(text: str) -> str:
    """Which alarms fired in which arm, and whether they were to."""
    lines = [
        "| arm | alarm | steps | first | worst value | threshold | as expected |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, runs in _arms(summary.read(text)).items():
        steps = sum(run["steps"] for run in runs)
        fired = sorted({metric for run in runs for metric in run["alarms"]})
        expected = _yes(bool(fired) == ARMS[arm].must_alarm)
        if not fired:
            lines.append(f"| {arm} | none | 0 of {steps} | | | | {expected} |")
        for metric in fired:
            mine = [run["alarms"][metric] for run in runs if metric in run["alarms"]]
            worst = max(mine, key=lambda a: abs(a["value"] - a["threshold"]))
            lines.append(
                f"| {arm} | `{metric}` | {sum(a['count'] for a in mine)} of {steps} "
                f"| {min(a['first_step'] for a in mine)} "
                f"| {worst['value']:.3g} | {worst['threshold']:.3g} | {expected} |"
            )
    broken = ", ".join(f"`{arm.name}`" for arm in ARMS.values() if arm.must_alarm)
    return "\n".join([*lines, "", f"Expected: alarms in {broken}, which is broken, and no other."])


def timing(text: str) -> str:
    """Wall time of a step, each arm alone on a GPU."""
    rows = summary.read(text)
    lines = [
        "| arm | step | rollout | tokens/s | training | update | steps with an alarm |",
        "|---|---|---|---|---|---|---|",
    ]
    timed = {row["arm"]: row for row in rows if row["kind"] == "timing" and row["n"]}
    for arm in filter(timed.__contains__, ARMS):
        row = timed[arm]
        step = row["step_s"]
        cells = [
            arm,
            f"{step['median']:.2f} s ({step['min']:.2f} to {step['max']:.2f})",
            f"{row['rollout_s']['median']:.2f} s",
            f"{row['tokens_per_s']['median']:,.0f}",
            f"{row['learn_s']['median']:.2f} s",
            f"{1e3 * row['update_s']['median']:.1f} ms",
            f"{row['alarm_steps']} of {row['steps']}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    steps = max((row["n"] for row in timed.values()), default=0)
    note = (
        f"`python examples/parity/run_all.py --timing`: medians of {steps} steps, one run alone on "
        f"a GPU, {_where(rows[0])}. Correction and metrics are part of the training, and the same "
        f"in every arm."
    )
    return "\n".join([*lines, "", note])


def _arms(rows: list[Row]) -> dict[str, list[Row]]:
    """Finished runs by arm, in the order of the arms."""
    runs = [row for row in rows if row["kind"] == "run"]
    found = {arm: [run for run in runs if run["arm"] == arm] for arm in ARMS}
    return {arm: sorted(mine, key=lambda r: r["seed"]) for arm, mine in found.items() if mine}


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "not yet"
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _before(start: Row) -> str:
    return f"The {start['model']} model begins at {start['judged']['reward']:.3f} (held out)."


def _how(rows: list[Row]) -> str:
    e = rows[0]
    models = " and ".join(f"{n / 1e6:.0f} M parameters ({m})" for m, n in e["parameters"].items())
    problems = max((r["judged"]["problems"] for r in rows if r.get("judged")), default=0)
    unfinished = [
        f"{r['arm']}-{r['seed']} ({r['steps']} steps)" for r in rows if r["kind"] == "unfinished"
    ]
    options = e["options"]
    return (
        f"`python examples/parity/run_all.py`: {models}, {options['steps']} steps of "
        f"{options['prompts']} problems with {options['group']} responses each, {_where(e)}, "
        f"{e['date']}. Means over seeds, least and largest. "
        f"Held-out reward: on {problems} held-out problems, one response each, by one BF16 engine "
        f"for the arms of a seed."
        + (f" Not finished: {', '.join(unfinished)}." if unfinished else "")
    )


def _where(e: Row) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in e["versions"].items())
    return f"{e['device']}, {versions}, commit {e['commit']}"


def _tested(found: Comparison, inside: bool) -> str:
    if found.interval is None or found.spread is None or found.p_t is None or found.p_tost is None:
        return f"{_signed(found.mean)} | | {_yes(inside)} | | |"
    low, high = found.interval
    of_t, of_tost = powers(found.spread, len(found.differences), MARGIN, ALPHA)
    return " | ".join(
        [
            _signed(found.mean),
            f"{low:+.3f} to {high:+.3f}",
            _yes(inside),
            f"p = {found.p_t:.2f}, {found.p_permutation:.2f}",
            f"{_yes(found.p_tost < ALPHA)}, p {at_most(found.p_tost)}",
            f"{of_t:.0%}, {of_tost:.0%}",
        ]
    )


def _signed(difference: float) -> str:
    return f"{difference:+.3f}" if round(difference, 3) else "0.000"


def at_most(p: float) -> str:
    """A p value, rounded up."""
    return "< 0.001" if p < 0.001 else f"= {math.ceil(1e3 * p) / 1e3:.3f}"


def _yes(truth: bool) -> str:
    return "yes" if truth else "no"


def _legend(judged: dict[str, dict[int, float]], found: dict[str, Comparison]) -> str:
    spreads = [
        f"{arm} {stdev(rewards.values()):.3f}"
        for arm, rewards in judged.items()
        if ARMS[arm].reference is None and len(rewards) > 1
    ]
    legend = (
        f"Held-out rewards, paired by seed; margin {MARGIN} and alpha {ALPHA} were fixed before "
        f"the runs. Standard deviation of the references' seeds: "
        f"{', '.join(spreads) or 'not yet'}. "
        f"Power: the chance of the t test to find a difference of the margin, and of TOST to find "
        f"none, at the spread that was seen."
    )
    if not found:
        return legend
    most = max(found.values(), key=lambda comparison: len(comparison.differences))
    differ = [
        f"{arm} ({comparison.mean:+.3f})"
        for arm, comparison in found.items()
        if comparison.p_t is not None and comparison.p_t < ALPHA
    ]
    return (
        f"{legend} The permutation test cannot give less than {most.least_p_permutation:.2g} with "
        f"{len(most.differences)} seeds. The t test found a difference in "
        f"{', '.join(differ) or 'no arm'}."
    )
