"""The measured block of docs/scale.md about what a step of an optimizer changes."""

from collections.abc import Mapping
from typing import Any

from benchmarks.tables.markdown import Column, facts, failures, joined, table

SPREAD = "{median:.2%} ({min:.2%} to {max:.2%})"


def flips(results: Mapping[str, Any]) -> str:
    """A line a learning rate."""
    rows = results["rows"]
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
    return joined(made, failures(results), f"{facts(results['environment'])}. {end}")
