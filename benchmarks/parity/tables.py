"""The tables of docs/parity.md and README's line about them, from results/parity.jsonl."""

import json
import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median, stdev

from benchmarks.parity.arms import ARMS
from benchmarks.parity.comparison import Comparison, compare, powers
from benchmarks.parity.run_log import Row
from benchmarks.parity.settings import ALPHA, LAST_STEPS, MARGIN

FP8_ARMS = {
    "fp8": "FP8 weights",
    "fp8-kv8": "with FP8 KV",
    "moe-fp8": "FP8 weights, mixture of experts",
}
"""Arms whose question was fixed before the runs."""


def rewards(text: str) -> str:
    """Final rewards of each arm, and how they were measured."""
    rows = rows_of(text)
    lines = [
        (
            arm,
            len(runs),
            _spread([run["held_out"]["reward"] for run in runs]),
            _spread([run["last_reward"] for run in runs]),
            _spread([run["evaluations"][-1][1] for run in runs]),
            f"{sum(run['alarm_steps'] for run in runs)} of {sum(run['steps'] for run in runs)}",
        )
        for arm, runs in _arms(rows).items()
    ]
    head = (
        f"arm | seeds | held-out reward | last {LAST_STEPS} steps | own engine at the end "
        f"| steps with an alarm"
    )
    starts = [
        f"The {row['model']} model begins at {row['held_out']['reward']:.3f} (held out)."
        for row in rows
        if row["kind"] == "start"
    ]
    e = rows[0]
    models = " and ".join(f"{n / 1e6:.0f} M parameters ({m})" for m, n in e["parameters"].items())
    options = e["options"]
    note = (
        f"`python -m benchmarks.parity.run_all`: {models}, {options['steps']} steps of "
        f"{options['prompts']} problems with {options['group']} responses each, {_where(e)}, "
        f"{e['date'][:10]}. Means over seeds, least and largest. Held-out reward: on "
        f"{options['held_out_problems']} held-out problems, one response each, by one BF16 engine "
        f"for the arms of a seed."
    )
    return "\n".join([_table(head, lines), "", *starts, note])


def tests(text: str) -> str:
    """Each arm minus its reference."""
    rows = rows_of(text)
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
    return f"{_table(head, lines)}\n\n{note}"


def mismatch(text: str) -> str:
    """How far rollout and trainer are apart, by arm."""
    lines = []
    for arm, runs in _arms(rows_of(text)).items():
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
    return f"{_table(head, lines)}\n\n{note}"


def alarms(text: str) -> str:
    """Which alarms fired in which arm, and whether they were to."""
    lines: list[Sequence[object]] = []
    for arm, runs in _arms(rows_of(text)).items():
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
    return f"{_table(head, lines)}\n\n{note}"


def timing(text: str) -> str:
    """Wall time of a step, each arm alone on a GPU."""
    rows = rows_of(text)
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
        f"on a GPU, {_where(rows[0])}. Correction and metrics are part of the training, and the "
        f"same in every arm."
    )
    head = "arm | step | rollout | tokens/s | training | update | steps with an alarm"
    return f"{_table(head, lines)}\n\n{note}"


def learning(text: str) -> str:
    """README's line: whether FP8 rollouts teach what BF16 rollouts teach."""
    rows = rows_of(text)
    held_out, found = held_out_rewards(rows), comparisons(rows)
    e = rows[0]
    parts = []
    for arm, what in FP8_ARMS.items():
        reference = ARMS[arm].reference or ""
        seeds = held_out[arm].keys() & held_out[reference].keys()
        ours, theirs = (fmean(held_out[n][seed] for seed in seeds) for n in (arm, reference))
        size = e["parameters"][ARMS[arm].model] / 1e6
        parts.append(f"{ours:.3f} beside {theirs:.3f} ({what}, {size:.0f} M parameters)")
    p_tost = [found[arm].p_tost for arm in FP8_ARMS]
    p = max(1.0 if one is None else one for one in p_tost)  # None: of a single seed
    pairs = min(len(found[arm].differences) for arm in FP8_ARMS)
    return (
        f"GRPO of small models, on FP8 rollouts beside BF16 rollouts of the same engine, ends at a "
        f"reward of {', '.join(parts)}; "
        f"{'the same' if p < ALPHA else 'not shown to be the same'} within {MARGIN} (TOST, "
        f"largest p {_at_most(p)}, pairs of seeds: {pairs}; {e['device']}, SGLang "
        f"{e['versions']['sglang']}, {e['date'][:10]}, commit {e['commit']})."
    )


BLOCKS = {
    "parity": ("parity.jsonl", rewards),
    "parity_tests": ("parity.jsonl", tests),
    "parity_mismatch": ("parity.jsonl", mismatch),
    "parity_alarms": ("parity.jsonl", alarms),
    "parity_timing": ("parity.jsonl", timing),
    "headline_learning": ("parity.jsonl", learning),
}
"""The file that each block is made from, and how."""


def rows_of(text: str) -> list[Row]:
    """The rows of the result file; the first is the environment."""
    return [json.loads(line) for line in text.splitlines()]


def held_out_rewards(rows: list[Row]) -> dict[str, dict[int, float]]:
    """By arm and seed, in the order of the arms."""
    return {
        arm: {run["seed"]: run["held_out"]["reward"] for run in runs}
        for arm, runs in _arms(rows).items()
    }


def comparisons(rows: list[Row]) -> dict[str, Comparison]:
    """Each arm beside its reference, where there is a seed of both."""
    rewards = held_out_rewards(rows)
    found = {}
    for arm, mine in rewards.items():
        theirs = rewards.get(ARMS[arm].reference or "", {})
        if both := sorted(mine.keys() & theirs.keys()):
            pair = [mine[seed] for seed in both], [theirs[seed] for seed in both]
            found[arm] = compare(*pair, MARGIN, ALPHA)
    return found


def _arms(rows: list[Row]) -> dict[str, list[Row]]:
    """Runs by arm, in the order of the arms."""
    runs = sorted((row for row in rows if row["kind"] == "run"), key=lambda row: row["seed"])
    found = {arm: [run for run in runs if run["arm"] == arm] for arm in ARMS}
    return {arm: mine for arm, mine in found.items() if mine}


def _table(head: str, lines: Iterable[Sequence[object]]) -> str:
    """Markdown; ``head``: the names of the columns, with bars between them."""
    rows = [f"| {' | '.join(map(str, line))} |" for line in lines]
    return "\n".join([f"| {head} |", "|---" * (head.count("|") + 1) + "|", *rows])


def _tested(found: Comparison, inside: bool) -> list[str]:
    """Cells of the table of tests; of a single seed there is no test."""
    mean = f"{found.mean:+.3f}" if round(found.mean, 3) else "0.000"
    if found.interval is None or found.spread is None or found.p_t is None or found.p_tost is None:
        return [mean, "", _yes(inside), "", "", ""]
    low, high = found.interval
    of_t, of_tost = powers(found.spread, len(found.differences), MARGIN, ALPHA)
    return [
        mean,
        f"{low:+.3f} to {high:+.3f}",
        _yes(inside),
        f"p = {found.p_t:.2f}, {found.p_permutation:.2f}",
        f"{_yes(found.p_tost < ALPHA)}, p {_at_most(found.p_tost)}",
        f"{of_t:.0%}, {of_tost:.0%}",
    ]


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.3f}"
    return f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _where(e: Row) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in e["versions"].items())
    return f"{e['device']}, {versions}, commit {e['commit']}"


def _at_most(p: float) -> str:
    """A p value, rounded up."""
    return "< 0.001" if p < 0.001 else f"= {math.ceil(1e3 * p) / 1e3:.3f}"


def _yes(truth: bool) -> str:
    return "yes" if truth else "no"
