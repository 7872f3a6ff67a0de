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
from sgl_fp8rl.tools.plan import shape

NVLINK = "nvlink_ms"
MEMORY_BYTES_MS, NVLINK_BYTES_MS = 4.27e9, 3.9e8
"""Bytes that a copy on an H200 moves in a millisecond, and that it reads from another H200 of its
host: copies took 389 to 393 GB/s between any two of four, all at once too."""
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


def sharded_kernels_ms(of: shape.Shape, gpus: int) -> float:
    """The engine's kernels, where FSDP2 and the engine share the GPUs of one host: each byte is
    read in BF16 and written in FP8 once.

    Tensor parallelism cuts o_proj and down_proj by columns and FSDP2 by rows: of these each rank
    reads what the other GPUs hold. Of everything else, whole experts included, both keep the same
    rows, which each rank reads in its own memory.
    """
    down = 0 if of.experts else of.hidden * of.intermediate
    columns = of.layers * (of.hidden * of.heads * of.head_dim + down)
    crossing = columns * shape.BF16_BYTES * (gpus - 1) / gpus
    own = of.weight_bytes(fp8=False) + of.weight_bytes(fp8=True) - crossing
    return (own / MEMORY_BYTES_MS + crossing / NVLINK_BYTES_MS) / gpus


def remote_s(of: shape.Shape, engines: int, gigabits: float, senders: int) -> float:
    """The outgoing links of trainer hosts: each sends its part of FP8 to the engines, which are on
    other hosts, and of BF16 to the other trainer hosts, which gather all."""
    codes = of.weight_bytes(fp8=True) * engines / senders
    gathered = of.weight_bytes(fp8=False) * (senders - 1) / senders
    return (codes + gathered) * 8 / gigabits / 1e9


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
        times = [sharded_kernels_ms(of, gpus) for gpus in PREDICTED_GPUS]
        cells.append([name, *(f"{each:.1f} ms" for each in times), f"{found:.1f} ms"])
    head = [f"{gpus} GPUs" for gpus in PREDICTED_GPUS]
    remote = [
        [
            f"{name}, {engines} engines, from {senders} host{'s' if senders > 1 else ''}",
            *(f"{remote_s(of, engines, link, senders):,.0f} s" for link in GIGABITS),
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
