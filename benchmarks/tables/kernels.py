"""The measured blocks of docs/performance_evidence.md about single kernels and GEMMs."""

from collections.abc import Mapping
from typing import Any

from benchmarks.tables.engines import copies
from benchmarks.tables.markdown import (
    Column,
    Form,
    facts,
    failures,
    grid,
    joined,
    table,
    with_share,
)
from sgl_fp8rl.engine.gemm.candidates import FLASHINFER, STOCK

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


def gemms(content: Results) -> str:
    """A shipped table of GEMMs: for each shape the batches where another kernel than SGLang's is
    taken, or where there is FlashInfer's, the batches that take it."""
    versions, shapes = content["versions"], content["shapes"]
    names = {entry["kernel"] for found in shapes.values() for entry in found}
    # what takes another kernel is in the table without FlashInfer's GEMM
    listed = {FLASHINFER} if FLASHINFER in names else names - {STOCK}
    lines = []
    for shape, found in shapes.items():
        faster = [
            f"{e['m']}: {e['stock_us'] / e['us']:.2f}x" for e in found if e["kernel"] in listed
        ]
        lines.append([shape.replace("x", " x "), ", ".join(faster)])
    batches = {entry["m"] for found in shapes.values() for entry in found}
    return joined(
        grid(["N x K", "rows: times as fast as SGLang's kernel"], lines),
        f"{content['gpu']}, torch {versions['torch']}, SGLang {versions['sglang']}, DeepGEMM "
        f"{versions['sgl-deep-gemm']}, FlashInfer {versions['flashinfer-python']}. Measured at "
        f"{len(batches)} batches up to {max(batches, default=0)} rows.",
    )
