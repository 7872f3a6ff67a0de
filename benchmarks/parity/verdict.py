"""Do FP8 rollouts teach what BF16 rollouts teach? From the rows of results/parity.jsonl."""

import math
from statistics import fmean

from benchmarks.parity.arms import ARMS
from benchmarks.parity.comparison import Comparison, compare
from benchmarks.parity.run_log import Row
from benchmarks.parity.settings import ALPHA, MARGIN

FP8_ARMS = {
    "fp8": "FP8 weights",
    "fp8-kv8": "with FP8 KV",
    "moe-fp8": "FP8 weights, mixture of experts",
    "smollm2-fp8-kv8": "FP8 weights and KV, SmolLM2-135M-Instruct from 4 bits",
}
"""Arms whose question was fixed before the runs."""


def runs_by_arm(rows: list[Row]) -> dict[str, list[Row]]:
    """Runs by arm, in the order of the arms."""
    runs = sorted((row for row in rows if row["kind"] == "run"), key=lambda row: row["seed"])
    found = {arm: [run for run in runs if run["arm"] == arm] for arm in ARMS}
    return {arm: mine for arm, mine in found.items() if mine}


def held_out_rewards(rows: list[Row]) -> dict[str, dict[int, float]]:
    """By arm and seed, in the order of the arms."""
    return {
        arm: {run["seed"]: run["held_out"]["reward"] for run in runs}
        for arm, runs in runs_by_arm(rows).items()
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


def learning(rows: list[Row]) -> str:
    """README's line: whether FP8 rollouts teach what BF16 rollouts teach."""
    held_out, found = held_out_rewards(rows), comparisons(rows)
    e = rows[0]
    parts, arms = [], [arm for arm in FP8_ARMS if arm in held_out]
    for arm in arms:
        reference = ARMS[arm].reference or ""
        seeds = held_out[arm].keys() & held_out[reference].keys()
        ours, theirs = (fmean(held_out[n][seed] for seed in seeds) for n in (arm, reference))
        size = e["parameters"][ARMS[arm].model] / 1e6
        what = f"{FP8_ARMS[arm]}, {size:.0f} M parameters"
        parts.append(f"{ours:.3f} beside {theirs:.3f} ({what})")
    p_tost = [found[arm].p_tost for arm in arms]
    p = max(1.0 if one is None else one for one in p_tost)  # None: of a single seed
    pairs = min(len(found[arm].differences) for arm in arms)
    return (
        f"GRPO of small models, on FP8 rollouts beside BF16 rollouts of the same engine, ends at a "
        f"reward of {', '.join(parts)}; "
        f"{'the same' if p < ALPHA else 'not shown to be the same'} within {MARGIN} (TOST, "
        f"largest p {at_most(p)}, pairs of seeds: {pairs}; {e['device']}, SGLang "
        f"{e['versions']['sglang']}, {e['date'][:10]}, commit {e['commit']})."
    )


def at_most(p: float) -> str:
    """A p value, rounded up."""
    return "< 0.001" if p < 0.001 else f"= {math.ceil(1e3 * p) / 1e3:.3f}"
