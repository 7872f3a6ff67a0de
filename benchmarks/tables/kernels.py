"""The measured blocks of docs/performance_evidence.md about single kernels and GEMMs."""

from collections.abc import Mapping
from typing import Any

from benchmarks.tables.engines import copies
from benchmarks.tables.markdown import (
    Column,
    Form,
    Row,
    facts,
    failures,
    joined,
    table,
    with_ratio,
    with_share,
)
from sgl_fp8rl.gemm.candidates import FLASHINFER, STOCK

Results = Mapping[str, Any]
STOCK_US = ("stock", "kernel_us")


def kernels(results: Results) -> str:
    """Each kernel at each size: us of SGLang's and of ours, the ratio, and our share of the floor.

    Sizes that are tokens make one table, those that are batch x context another.
    """
    rows = with_ratio(results["rows"], "kernel_us", lambda row: bool(row["arm"] == "stock"))
    rows = with_share(rows, "kernel_floor_us", "kernel_us", "of floor")
    placed = []
    for row in rows:
        kernel, _, size = row["case"].partition(": ")
        stock = {"metric": "stock_us"} if (row["arm"], row["metric"]) == STOCK_US else {}
        placed.append(row | {"kernel": kernel, "size": size} | stock)
    sizes = list(dict.fromkeys(row["size"] for row in placed))
    metrics: dict[str, Form] = {
        "stock_us": lambda row: f"{_us(row['median'])} SGLang",
        "kernel_us": lambda row: f"{_us(row['median'])} ours",
        "faster": "{median:.2f}x",
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


def gemms(content: Results) -> str:
    """A shipped table of GEMMs: the batches where another kernel than SGLang's is taken, or where
    there is FlashInfer's, the batches that take it."""
    versions = content["versions"]
    rows = [
        entry | {"rows": str(entry["m"]), "shape": shape.replace("x", " x "), "metric": "us"}
        for shape, found in content["shapes"].items()
        for entry in found
    ]
    names = {row["kernel"] for row in rows}
    # what takes another kernel is in the table without FlashInfer's GEMM
    listed = {FLASHINFER} if FLASHINFER in names else names - {STOCK}
    taken = {row["rows"] for row in rows if row["kernel"] in listed}
    shown = sorted((row for row in rows if row["rows"] in taken), key=lambda row: int(row["rows"]))

    def cell(row: Row) -> str:
        faster = f", {row['stock_us'] / row['us']:.2f}x" if row["kernel"] != STOCK else ""
        return f"{_us(row['us'])}{faster}"

    shapes = [name.replace("x", " x ") for name in content["shapes"]]
    columns = [Column(shape, {"us": cell}, {"shape": shape}) for shape in shapes]
    batches = {row["m"] for row in rows}
    return joined(
        table(shown, ["rows"], columns, "rows"),
        f"{content['gpu']}, torch {versions['torch']}, SGLang {versions['sglang']}, DeepGEMM "
        f"{versions['sgl-deep-gemm']}, FlashInfer {versions['flashinfer-python']}. Measured at "
        f"{len(batches)} batches up to {max(batches, default=0)} rows; at those that are not here "
        f"{'all are as in the table above' if FLASHINFER in names else 'all are of SGLang'}.",
    )
