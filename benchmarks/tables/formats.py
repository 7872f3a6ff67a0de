"""The measured block of docs/compatibility.md about weight formats."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tables.markdown import Column, Row, facts, failures, grid, joined, table

NAMES = {
    "bf16": "BF16",
    "block-fp8": "block FP8",
    "channel-fp8": "channel FP8",
    "int8": "INT8",
}


def formats(results: Mapping[str, Any]) -> str:
    """Errors, then times, one line for each layer."""
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
        _times(rows, batches),
    ]
    end = f"{facts(results['environment'])}. Errors of {batches[-1]} tokens."
    return joined(*made, failures(results), end)


def _times(rows: Sequence[Row], batches: Sequence[str]) -> str:
    """In each cell the formats in the order of ``NAMES``; a dash for one that did not run."""
    timed = {
        (row["model"], row["layer"], row["tokens"], row["arm"]): _us(row)
        for row in rows
        if row["metric"] == "gemm_us"
    }
    lines = [
        [f"{model}, {layer}"]
        + [", ".join(timed.get((model, layer, n, arm), "-") for arm in NAMES) for n in batches]
        for model, layer in dict.fromkeys(key[:2] for key in timed)
    ]
    head = [f"time, us: {', '.join(NAMES.values())}", *(f"{n} tokens" for n in batches)]
    return grid(head, lines)


def _placed(row: Row) -> Row:
    layer, _, tokens = row["case"].rpartition(": ")
    return row | {"layer": layer, "tokens": tokens}


def _us(row: Row) -> str:
    return f"{row['median']:.0f}" if row["median"] >= 100 else f"{row['median']:.1f}"
