"""The measured blocks of docs/performance_evidence.md about single kernels."""

from collections.abc import Mapping
from typing import Any

from benchmarks.tables.engines import copies
from benchmarks.tables.markdown import (
    Column,
    Form,
    facts,
    failures,
    joined,
    table,
    with_share,
)

Results = Mapping[str, Any]
STOCK_US = ("stock", "kernel_us")


def kernels(results: Results) -> str:
    """Each kernel at each size: us of SGLang's and of ours, and our share of the floor.

    Sizes that are tokens make one table, those that are batch x context another.
    """
    rows = with_share(results["rows"], "kernel_floor_us", "kernel_us", "of floor")
    placed = []
    for row in rows:
        kernel, _, size = row["case"].partition(": ")
        stock = {"metric": "stock_us"} if (row["arm"], row["metric"]) == STOCK_US else {}
        placed.append(row | {"kernel": kernel, "size": size} | stock)
    sizes = list(dict.fromkeys(row["size"] for row in placed))
    metrics: dict[str, Form] = {
        "stock_us": lambda row: _us(row["median"]),
        "kernel_us": lambda row: _us(row["median"]),
        "of floor": "{median:.0%}",
    }
    made = [
        table(placed, ["kernel"], [Column(s, metrics, {"size": s}) for s in some], head)
        for head, some in (
            ("tokens", sorted((size for size in sizes if size.isdigit()), key=int)),
            ("batch x context", [size for size in sizes if not size.isdigit()]),
        )
    ]
    timed = [row for row in results["rows"] if row["metric"] == "kernel_us"]
    spread = max(((row["max"] - row["min"]) / row["median"] for row in timed), default=0.0)
    end = f"{facts(results['environment'])}. Medians in us; least and most of a cell are at most "
    return joined(
        *made, failures(results), f"{end}{spread:.0%} of its median apart. {copies(rows)}"
    )


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
