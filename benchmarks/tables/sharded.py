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
    grid,
    joined,
    table,
    with_ratio,
)
from sgl_fp8rl.protocol.manifest import MOST_SLOTS, SLOTS
from sgl_fp8rl.tools.plan import shape, update_time

NVLINK = "nvlink_ms"
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
            "median": update_time.codes_over_nvlink_ms(
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


PREDICTED_GPUS = (2, 4, 8)
QWEN3_235B = shape.Shape(
    hidden=4096,
    intermediate=1536,
    layers=94,
    heads=64,
    kv_heads=4,
    head_dim=128,
    vocab=151936,
    experts=128,
    experts_per_token=8,
)
KIMI_K2 = shape.Shape(
    hidden=7168,
    intermediate=2048,
    layers=61,
    heads=64,
    kv_heads=1,
    head_dim=128,
    vocab=163840,
    experts=384,
    experts_per_token=8,
)
"""With plain attention of about the size of its own, which is 1% of it."""
REMOTE = (("Qwen3-235B", QWEN3_235B, 8), ("Kimi K2, 1T", KIMI_K2, 32))
"""Engines of eight GPUs, each on a host of its own, as many trainer hosts beside them: 64 and 256
GPUs of each."""
GIGABITS = 100.0, 400.0
"""Of each host's link."""


def kernels_ms(results: Mapping[str, Any]) -> dict[str, float]:
    """Median time of the engine's kernels, of each model with BF16 shards on its GPUs."""
    what = "fp8rl", "from bfloat16 shards", "update_gpu_ms"
    return {
        row["model"]: row["median"]
        for row in results["rows"]
        if (row["arm"], row["case"], row["metric"]) == what
    }


def predicted(results: Mapping[str, Any]) -> str:
    """The kernels of an update from shards by the model's formula, beside what was measured."""
    cells = []
    for name, found in kernels_ms(results).items():
        of = shape.of(config(SHAPES[name]))
        times = [update_time.sharded_kernels_ms(of, gpus) for gpus in PREDICTED_GPUS]
        cells.append([name, *(f"{each:.1f} ms" for each in times), f"{found:.1f} ms"])
    head = [f"{gpus} GPUs" for gpus in PREDICTED_GPUS]
    remote = [
        [
            f"{name}, {engines} engines, from {senders} host{'s' if senders > 1 else ''}",
            *(f"{update_time.remote_s(of, engines, link, senders):,.0f} s" for link in GIGABITS),
        ]
        for name, of, engines in REMOTE
        for senders in (1, min(engines, MOST_SLOTS // SLOTS))
    ]
    links = [f"{link:.0f} Gb/s a host" for link in GIGABITS]
    return joined(
        grid(
            ["engine's kernels, predicted", *head, f"measured, {trainer_gpus(results)} GPUs"], cells
        ),
        grid(["engines on other hosts, by the links alone", *links], remote),
    )
