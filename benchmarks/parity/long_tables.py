"""The tables of docs/long_responses.md, from the rows of results/long_responses.jsonl."""

from collections.abc import Iterator
from math import nan
from operator import mul
from statistics import fmean, median

from benchmarks.parity.dose_arms import STUDIES
from benchmarks.parity.dose_verdict import SHARE, lost, runs_of
from benchmarks.parity.positions import PARTS, STARTS
from benchmarks.parity.run_log import Row
from benchmarks.parity.settings import LAST_STEPS
from benchmarks.parity.tables import percent, table, where
from benchmarks.parity.tasks import LONG

FIRST_STEPS = 10
RANGES = [
    f"{first} to {after - 1}" if after else f"from {first}"
    for first, after in zip(STARTS, [*STARTS[1:], None], strict=True)
]
"""Of positions, as tables name them."""
ROWS = "run", "unevaluated"
"""Kinds of rows. A run that the deadline stopped has no held-out reward."""
LEAST_END, MOST_END, LEAST_GAIN = 0.3, 0.95, 0.25
"""Of the reference's held-out reward; outside of them the run is inconclusive."""


def responses(rows: list[Row]) -> str:
    """Each arm beside the reference of its execution."""
    head = (
        f"execution | arm | steps | held-out reward | of level {LONG} | lost, of the gain | found "
        f"| own engine, last {LAST_STEPS} steps | less bf16, the last {LAST_STEPS} that both have "
        f"| tokens a response | k3, first {FIRST_STEPS} steps | k3, all steps "
        f"| k3 from token 256 on, over tokens 16 to 63 | steps with an alarm"
    )
    notes = [_note(rows, row) for row in rows if row["kind"] == "environment"]
    return "\n\n".join([table(head, _lines(rows)), *notes])


def _lines(rows: list[Row]) -> Iterator[tuple[object, ...]]:
    references = runs_of(rows, "bf16", *ROWS)
    for arm in STUDIES["long"]:
        for key, run in runs_of(rows, arm, *ROWS).items():
            reference = references.get(key) if arm != "bf16" else None
            series = run["series"]
            k3 = series["mismatch_kl_k3"]
            # there is none where responses of some step were all shorter
            far, near = (series.get(f"position_{n}/mismatch_kl_k3") for n in (256, 16))
            yield (
                key[0][:16],
                arm,
                run["steps"],
                *_judged(run, reference, _start_of(rows, key[0])),
                f"{run['last_reward']:.3f}",
                "" if reference is None else f"{_less(run, reference):+.3f}",
                f"{median(series['response_tokens']):.0f}",
                f"{median(k3[:FIRST_STEPS]):.1e}",
                f"{median(k3):.1e}",
                f"{median(far) / median(near):.1f}" if far and near else "",
                f"{run['alarm_steps']} of {run['steps']}",
            )


def _judged(run: Row, reference: Row | None, begun: float | None) -> list[str]:
    """Held-out rewards and what they say; empty of a run that was not evaluated."""
    if "held_out" not in run:
        return [""] * 4
    ends, by_kind = run["held_out"]["reward"], run["held_out"]["by_kind"]
    long = fmean(reward for name, reward in by_kind.items() if name.endswith(f" {LONG}"))
    part, found = None, ""
    if reference is not None and "held_out" in reference and begun is not None:
        end = reference["held_out"]["reward"]
        part = lost(end - ends, end - begun)
        if part is not None and is_valid(reference, begun):
            found = "lost" if part > SHARE else "not lost"
    return [f"{ends:.3f}", f"{long:.3f}", percent(part), found]


def _less(run: Row, reference: Row) -> float:
    """The reward in training less the reference's, also where one of them was stopped before."""
    both = list(zip(run["series"]["reward"], reference["series"]["reward"], strict=False))
    return fmean(ours - theirs for ours, theirs in both[-LAST_STEPS:])


def _start_of(rows: list[Row], execution: str) -> float | None:
    """The held-out reward of what an execution's runs began with, if it was measured."""
    starts = (row for row in rows if row["kind"] == "start" and row["execution"] == execution)
    return next((float(row["held_out"]["reward"]) for row in starts), None)


def is_valid(reference: Row, begun: float) -> bool:
    """Whether the reference has learned as much as an experiment needs to say something."""
    end = reference["held_out"]["reward"]
    return bool(LEAST_END <= end <= MOST_END and end - begun >= LEAST_GAIN)


def _note(rows: list[Row], e: Row) -> str:
    begun, options = _start_of(rows, e["execution"]), e["options"]
    found = [run for key, run in runs_of(rows, "bf16").items() if key[0] == e["execution"]]
    solves, valid = "The start was not evaluated", ""
    if begun is not None:
        solves = f"The start solves {begun:.3f} of them"
        valid = ", ".join("conclusive" if is_valid(r, begun) else "inconclusive" for r in found)
    return (
        f"{options['steps']} steps of {options['prompts']} problems with {options['group']} "
        f"responses each; {options['held_out_problems']} held-out problems. {solves}. By the rule "
        f"above: {valid or 'no reference'}. Medians over steps. {e['date'][:16]} {where(e)}."
    )


def by_position(rows: list[Row]) -> str:
    """k3 of the start's tokens by position, for each engine and kind of problem."""
    lines = [*_positions(rows)]
    if not lines:
        return "Not measured yet."
    first, last = RANGES[0], RANGES[-1]
    head = " | ".join(
        [
            "execution | engine | problems",
            *(f"k3 of tokens {name}" for name in RANGES),
            f"k3, {last} over {first}",
            f"mean difference of logprobs, {first} and {last}",
            f"entropy, {first} and {last}",
        ]
    )
    return table(head, lines) + (
        f"\n\nk3: mean over tokens of the responses to problems of level {LONG}, least and largest "
        f"of {PARTS} parts of them. The difference is without its sign; entropy: nats a token."
    )


def _positions(rows: list[Row]) -> Iterator[tuple[object, ...]]:
    for row in rows:
        if row["kind"] != "positions":
            continue
        k3 = [_pooled(row, "mismatch_kl_k3", first) for first in STARTS]
        parts = [row["mismatch_kl_k3"][f"{first}"] for first in STARTS]
        ends = [
            " and ".join(f"{_pooled(row, metric, first):.2g}" for first in (STARTS[0], STARTS[-1]))
            for metric in ("logprob_abs_diff_mean", "rollout_nll")
        ]
        yield (
            row["execution"][:16],
            row["engine"],
            row["problems"],
            *(
                f"{mean:.1e} ({min(each):.1e} to {max(each):.1e})"
                for mean, each in zip(k3, parts, strict=True)
            ),
            f"{k3[-1] / k3[0]:.1f}",
            *ends,
        )


def _pooled(row: Row, metric: str, first: int) -> float:
    """Mean over the tokens of all parts, in the range that begins with ``first``; NaN of none."""
    values, tokens = row[metric][f"{first}"], row["tokens"][f"{first}"]
    return float(sum(map(mul, values, tokens)) / (sum(tokens) or nan))


BLOCKS = {
    "long_responses": ("long_responses.jsonl", responses),
    "long_positions": ("long_responses.jsonl", by_position),
}
"""The file that each block is made from, and how."""
