"""The blocks of docs/pretrained.md on formats, from results/pretrained.jsonl: a row of the
environment, one of the weights, then the arms."""

import math
from statistics import fmean, stdev
from typing import Any

from benchmarks.pretrained.arms import ARMS, BF16
from benchmarks.tables.learning import where

Row = dict[str, Any]
SHOWN = (BF16, "fp8-kv8")
"""Arms whose answers are shown."""
DIGEST = 12
"""Characters of a digest that are shown."""


def formats(rows: list[Row]) -> str:
    """Perplexity and mismatch of each arm."""
    environment, _, *arms = rows
    reference = next(row for row in arms if row["arm"] == BF16)
    sampled = [row["sampled_tokens"] for row in arms]
    lines = [
        "| engine | quantized matrices | perplexity | log of its ratio to BF16's "
        "| mismatch KL (k3) | ESS | logprob error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in arms:
        cells = [
            f"`{row['arm']}`: {ARMS[row['arm']].what}",
            row["quantized_matrices"],
            f"{row['perplexity']:.2f}",
            "" if row is reference else ratio(row["nll"], reference["nll"]),
            f"{row['mismatch_kl_k3']:.1e}",
            f"{row['ess']:.4f}",
            f"{row['logprob_abs_diff_mean']:.4f}",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    files = ", ".join(
        f"`{name}` ({digest[:DIGEST]})" for name, digest in environment["texts"].items()
    )
    return "\n".join(lines) + (
        f"\n\nPerplexity of {reference['tokens']} tokens in {len(reference['nll'])} windows of "
        f"{environment['work']['length']}: {files}; the brackets hold the files' SHA-256. Log of "
        f"ratio: mean over windows, +- one standard error of paired windows. Mismatch: of "
        f"{min(sampled)} to {max(sampled)} tokens that engines sample, against transformers in "
        f"BF16 with an FP32 head. {machine(environment)}"
    )


def ratio(mine: list[float], theirs: list[float]) -> str:
    """Mean difference of the windows' -logprob, with its standard error."""
    differences = [a - b for a, b in zip(mine, theirs, strict=True)]
    error = stdev(differences) / math.sqrt(len(differences))
    return f"{fmean(differences):+.4f} +- {error:.4f}"


def answers(rows: list[Row]) -> str:
    """Greedy answers of two arms, one below the other."""
    environment, _, *arms = rows
    given = {row["arm"]: row["answers"] for row in arms if row["arm"] in SHOWN}
    lines = ["| question | engine | answer |", "|---|---|---|"]
    for question in given[BF16]:
        for arm, mine in given.items():
            shown = " / ".join(line for line in mine[question].splitlines() if line.strip())
            lines.append(f"| {question} | `{arm}` | {shown.replace('|', ' ')} |")
    new = environment["work"]["new"]
    return "\n".join(lines) + f"\n\nGreedy, {new} tokens at most. {machine(environment)}"


def weights(rows: list[Row]) -> str:
    """What the grid of the source does to the error of FP8."""
    _, row, *_ = rows
    return (
        f"Block FP8 adds {row['fp8_error']:.2%} to the weights (RMS over RMS, median of "
        f"{row['matrices']} matrices), {row['fp8_error_off_grid']:.2%} where noise of one step of "
        f"their grid is added first, and {row['fp8_error_gaussian']:.2%} to Gaussian weights of "
        f"the same shapes. The largest weight of a matrix is {row['peak']:.0f} times its RMS "
        f"(median; at most {row['largest_peak']:.0f}), {row['peak_gaussian']:.1f} times in "
        f"Gaussian ones."
    )


BLOCKS = {
    "pretrained_formats": ("pretrained.jsonl", formats),
    "pretrained_answers": ("pretrained.jsonl", answers),
    "pretrained_weights": ("pretrained.jsonl", weights),
}
"""The file that each block is made from, and how."""


def machine(environment: Row) -> str:
    """Where it ran."""
    facts = {**environment, **environment["versions"], "date": environment["date"][:10]}
    return where(facts, "sglang", "torch", "transformers")
