"""The measured block of docs/compatibility.md about scales that are powers of two."""

from collections.abc import Mapping
from typing import Any

from benchmarks.tables.markdown import Column, facts, failures, joined, table

SPREAD = "{median:.2%} ({min:.2%} to {max:.2%})"


def rounded_scales(results: Mapping[str, Any]) -> str:
    """A line for what is quantized, or multiplied."""
    arms = dict.fromkeys(row["arm"] for row in results["rows"])
    columns = [Column(f"`{arm}`", {"error": SPREAD}, {"arm": arm}) for arm in arms]
    made = table(results["rows"], ["case"], columns, "error of")
    end = "Medians over matrices (least to most)."
    return joined(made, failures(results), f"{facts(results['environment'])}. {end}")
