"""Rows of result files as markdown tables."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Row = dict[str, Any]
Form = str | Callable[[Row], str]
"""A format string over a row's keys, such as "{median:.1f} ms", or what makes the text of a row."""
VERSIONS = {"driver": "driver", "sglang": "SGLang", "torch": "torch", "flashinfer": "FlashInfer"}


@dataclass(frozen=True)
class Column:
    """One column: in each cell the metrics that the line has, with commas between them."""

    head: str
    metrics: Mapping[str, Form]
    where: Mapping[str, str] = field(default_factory=dict)
    """What else the rows must be, such as ``{"case": "64x8192"}``."""


def table(
    rows: Sequence[Row],
    by: Sequence[str],
    columns: Sequence[Column],
    head: str,
) -> str:
    """A line for each value of the keys ``by``, in the order of the rows, that has any cell."""
    lines = []
    for values in dict.fromkeys(tuple(row[key] for key in by) for row in rows):
        mine = [row for row in rows if tuple(row[key] for key in by) == values]
        cells = [_cell(mine, column) for column in columns]
        if any(cells):
            lines.append([", ".join(values), *cells])
    return grid([head, *(column.head for column in columns)], lines)


def grid(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table of these cells, or nothing where it has no lines."""
    filled = [list(line) for line in lines]
    if not filled:
        return ""
    return "\n".join(f"| {' | '.join(c)} |" for c in (head, ["---"] * len(head), *filled))


def with_ratio(
    rows: Sequence[Row],
    metric: str,
    reference: Callable[[Row], bool],
    name: str = "faster",
    same: Sequence[str] = ("model", "case"),
) -> list[Row]:
    """The rows, and for each ``metric`` how many times less it is than the best reference's.

    Args:
        reference: which rows are compared with.
        same: what a row and its reference must have in common.
    """
    timed = [row for row in rows if row["metric"] == metric]
    made = []
    for row in timed:
        others = [o["median"] for o in timed if reference(o) and all(o[k] == row[k] for k in same)]
        if others and not reference(row):
            made.append(row | {"metric": name, "median": min(others) / row["median"]})
    return [*rows, *made]


def with_share(rows: Sequence[Row], part: str, whole: str, name: str) -> list[Row]:
    """The rows, and for each arm, model and case the metric ``part`` over the metric ``whole``."""
    found = {(row["arm"], row["model"], row["case"], row["metric"]): row for row in rows}
    made = []
    for (*place, metric), row in found.items():
        other = found.get((*place, part)) if metric == whole else None
        if other is not None:
            made.append(row | {"metric": name, "median": other["median"] / row["median"]})
    return [*rows, *made]


def facts(environment: Mapping[str, Any], gpus: int = 1) -> str:
    """Device, of which so many were used, versions, date and commit."""
    count = environment.get("count", 1)
    device = environment["device"] if gpus == 1 else f"{gpus} x {environment['device']}"
    words = [device + (f" (of {count} in the host)" if count > gpus else "")]
    words += [f"{name} {environment[key]}" for key, name in VERSIONS.items() if key in environment]
    return ", ".join([*words, environment["date"], f"commit {environment['commit']}"])


def runs_of_each_arm(fewest: int, most: int) -> str:
    """The sentence that says how many runs a table is made of."""
    if fewest < most:
        return f"{fewest} to {most} runs of each arm."
    return "One run of each arm." if most == 1 else f"{most} runs of each arm."


def failures(results: Mapping[str, Any]) -> str:
    """A paragraph for each job that failed."""
    return "\n\n".join(f"{name} fails: {why}" for name, why in results["failures"].items())


def joined(*parts: str) -> str:
    """Paragraphs and tables, without those that are empty."""
    return "\n\n".join(part for part in parts if part)


def _cell(rows: Sequence[Row], column: Column) -> str:
    texts = []
    for metric, form in column.metrics.items():
        found = [
            row
            for row in rows
            if row["metric"] == metric and all(row[k] == v for k, v in column.where.items())
        ]
        if len(found) > 1:
            raise ValueError(f"{len(found)} rows of {metric} in one cell of {column.head}")
        texts += [form.format(**row) if isinstance(form, str) else form(row) for row in found]
    return ", ".join(texts)
