"""The measured block of docs/scale.md about what a step of an optimizer changes."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tables.markdown import Column, Row, facts, failures, grid, joined, table

SPREAD = "{median:.2%} ({min:.2%} to {max:.2%})"


def flips(results: Mapping[str, Any]) -> str:
    """A line a learning rate: of all steps and layers, by layer and by step."""
    rows = [row for row in results["rows"] if ", " not in row["case"]]
    columns = [
        Column("codes", {"codes_changed": SPREAD}),
        Column("least matrix", {"codes_changed_least": "{median:.2%}"}),
        Column("most", {"codes_changed_most": "{median:.2%}"}),
        Column("scales", {"scales_changed": SPREAD}),
        Column("sent, of the FP8 bytes", {"fp8_sent": SPREAD}),
        Column("embedding", {"embed_tokens_changed": "{median:.1%}"}),
        Column("head", {"lm_head_changed": "{median:.1%}"}),
        Column("step, RMS of the rate", {"step_rms": "{median:.2f} ({min:.2f} to {max:.2f})"}),
    ]
    made = table(rows, ["case"], columns, "learning rate")
    steps = max(row["n"] for row in rows)
    end = f"{rows[0]['model']} parameters, {steps} steps: medians (least to most)."
    parts = (_by(results["rows"], kind) for kind in ("layer", "step"))
    return joined(made, *parts, failures(results), f"{facts(results['environment'])}. {end}")


def _by(rows: Sequence[Row], kind: str) -> str:
    """The codes of each layer, or after each step, of which there are rows."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        rate, _, of = row["case"].partition(f", {kind} ")
        if of and row["metric"] == "codes_changed":
            found.setdefault(rate, {})[of] = f"{row['median']:.2%}"
    heads = list(dict.fromkeys(of for each in found.values() for of in each))
    lines = [[rate, *(each.get(of, "") for of in heads)] for rate, each in found.items()]
    return grid([f"codes, {kind}", *heads], lines)
