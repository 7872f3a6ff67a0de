"""The measured block of docs/compatibility.md about weight formats."""

from collections.abc import Mapping
from typing import Any

from benchmarks.tables.markdown import Column, Row, facts, failures, joined, table

NAMES = {
    "bf16": "BF16",
    "block-fp8": "block FP8",
    "channel-fp8": "channel FP8",
    "int8": "INT8",
}


def formats(results: Mapping[str, Any]) -> str:
    """Errors, one line for each layer, then times, one for each layer and batch."""
    rows = [_placed(row) for row in results["rows"]]
    batches = list(dict.fromkeys(row["tokens"] for row in rows))
    errors = {"error": "{median:.2%}", "error_outliers": "{median:.2%}"}
    made = [
        table(
            [row for row in rows if row["tokens"] == batches[-1]],
            ["model", "layer"],
            [Column(name, errors, {"arm": arm}) for arm, name in NAMES.items()],
            "error: normal, with outliers",
        ),
        table(
            rows,
            ["model", "layer", "tokens"],
            [Column(name, {"gemm_us": _us}, {"arm": arm}) for arm, name in NAMES.items()],
            "time, us: layer, tokens",
        ),
    ]
    end = f"{facts(results['environment'])}. Errors of {batches[-1]} tokens."
    return joined(*made, failures(results), end)


def _placed(row: Row) -> Row:
    layer, _, tokens = row["case"].rpartition(": ")
    return row | {"layer": layer, "tokens": tokens}


def _us(row: Row) -> str:
    return f"{row['median']:.0f}" if row["median"] >= 100 else f"{row['median']:.1f}"
