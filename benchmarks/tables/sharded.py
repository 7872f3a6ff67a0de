"""The measured block of docs/scale.md about a trainer that is sharded over several GPUs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.engines.models import SHAPES, config
from benchmarks.tables.engines import is_reference
from benchmarks.tables.markdown import (
    Column,
    Row,
    facts,
    failures,
    joined,
    table,
    with_ratio,
)
from sgl_fp8rl.tools.plan import shape

NVLINK = "nvlink_ms"
NVLINK_BYTES_MS = 3.9e8
"""Bytes that a copy reads from another GPU of its host in a millisecond: on H200s 389 to 393 GB/s
between any two of four, all at once too."""
READERS: dict[str, Callable[[int], tuple[int, float]]] = {
    "to other GPUs": lambda gpus: (gpus, 0.0),
    "to an engine on each GPU": lambda gpus: (1, 1 / gpus),
}
"""Of codes, by where engines are and the trainer's GPUs: the ranks of an engine, and how much each
reads of its own GPU."""
SPREAD = "{median:.0f} ms ({min:.0f} to {max:.0f})"


def sharded(results: Mapping[str, Any]) -> str:
    """A line for each way to update a model, beside the fastest of stock SGLang's."""
    placed = [row | {"place": row["case"].partition(", ")[2]} for row in results["rows"]]
    rows = with_ratio(placed, "update_wall_ms", is_reference, same=["model", "place"])
    # of the ranks' kernels, what begin does not cover
    waits = Column("quantize", {"update_quantize_ms": "{median:.1f} ms"})
    rows += read_over_nvlink(rows, trainer_gpus(results))
    links = Column("NVLink, predicted", {NVLINK: "{median:.1f} ms"})
    columns = [
        Column("update", {"update_wall_ms": SPREAD}),
        Column("faster than the best stock row", {"faster": "{median:.1f}x"}),
        Column("begin", {"update_begin_ms": "{median:.1f} ms"}),
        *([waits] if any(row["metric"] in waits.metrics for row in rows) else []),
        Column("write", {"update_write_ms": "{median:.1f} ms"}),
        Column("commit", {"update_commit_ms": "{median:.1f} ms"}),
        Column("engine's kernels", {"update_gpu_ms": "{median:.1f} ms"}),
        *([links] if any(row["metric"] == NVLINK for row in rows) else []),
        Column("extra memory", {"peak_extra_gib": "{max:.2f} GiB"}),
    ]
    made = table(rows, ["model", "arm", "case"], columns, "model, engine, weights")
    runs = max(row["n"] for row in rows)
    gpus = trainer_gpus(results)
    end = f"{facts(results['environment'], gpus=gpus)}. Medians of {runs} (least to most)."
    return joined(made, failures(results), end)


def read_over_nvlink(rows: Sequence[Row], gpus: int) -> list[Row]:
    """What the links alone would take, for each row of kernels that read codes."""
    return [
        row
        | {
            "metric": NVLINK,
            "median": codes_over_nvlink_ms(
                shape.of(config(SHAPES[row["model"]])), *READERS[row["place"]](gpus)
            ),
        }
        for row in rows
        if row["metric"] == "update_gpu_ms" and row["place"] in READERS
    ]


def trainer_gpus(results: Mapping[str, Any]) -> int:
    """Of the trainer; two where the file is older than this metric."""
    found = [row["median"] for row in results["rows"] if row["metric"] == "trainer_gpus"]
    return int(max(found, default=2))


def codes_over_nvlink_ms(of: shape.Shape, ranks: int, own: float) -> float:
    """What a rank of an engine reads of other GPUs of the host, where the trainer's ranks made
    codes.

    Args:
        ranks: of the engine, which share the weights.
        own: how much of what it reads lies on its own GPU, from 0 to 1.
    """
    return of.weight_bytes(fp8=True) / ranks * (1 - own) / NVLINK_BYTES_MS
