"""Cells of the tables that are made from result files."""

from typing import Any

Metrics = dict[str, dict[str, Any]]
"""Rows of one arm by metric."""


def cell(found: Metrics, metric: str, form: str) -> str:
    """The median of a metric; empty where the arm does not have it."""
    return form.format(found[metric]["median"]) if metric in found else ""
