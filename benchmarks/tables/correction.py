"""The measured blocks of docs/correction.md about what a correction costs."""

from collections.abc import Mapping
from typing import Any

from benchmarks.tables.markdown import Column, Form, Row, facts, failures, joined, table

Results = Mapping[str, Any]
LAUNCHES: Mapping[str, Form] = {"correction_launches": "{median:.0f}"}
KERNELS: Mapping[str, Form] = {"correction_kernels_ms": "{median:.2f} ms"}


def correction(results: Results) -> str:
    """A line a case; as many columns as the machine had arms."""
    e, rows = results["environment"], results["rows"]
    columns = [
        Column("one core", {"correction_ms": _spread}, {"arm": "one core"}),
        Column("operations", LAUNCHES, {"arm": "one core"}),
        Column("one GPU", {"correction_ms": _spread}, {"arm": "one GPU"}),
        Column("launches", LAUNCHES, {"arm": "one GPU"}),
        Column("kernels", KERNELS, {"arm": "one GPU"}),
    ]
    arms = {row["arm"] for row in rows}
    columns = [column for column in columns if column.where["arm"] in arms]
    made = table(rows, ["case"], columns, rows[0]["model"])
    core = f"; a core of {e['cpu']}" if e.get("cpu", e["device"]) != e["device"] else ""
    runs = max(row["n"] for row in rows)
    return joined(made, failures(results), f"{facts(e)}{core}. Medians of {runs} (least to most).")


def _spread(row: Row) -> str:
    digits = 0 if row["median"] >= 10 else 2
    median, least, most = (f"{row[name]:.{digits}f}" for name in ("median", "min", "max"))
    return f"{median} ms ({least} to {most})"
