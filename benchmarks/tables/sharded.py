"""The measured block of docs/scale.md about a trainer that is sharded over several GPUs."""

from collections.abc import Mapping
from typing import Any

from benchmarks.tables.engines import is_reference
from benchmarks.tables.markdown import Column, facts, failures, joined, table, with_ratio

SPREAD = "{median:.0f} ms ({min:.0f} to {max:.0f})"


def sharded(results: Mapping[str, Any]) -> str:
    """A line for each way to update a model, beside the fastest of stock SGLang's."""
    rows = with_ratio(results["rows"], "update_wall_ms", is_reference, same=["model"])
    columns = [
        Column("update", {"update_wall_ms": SPREAD}),
        Column("faster than the best stock row", {"faster": "{median:.1f}x"}),
        Column("begin", {"update_begin_ms": "{median:.1f} ms"}),
        Column("write", {"update_write_ms": "{median:.1f} ms"}),
        Column("commit", {"update_commit_ms": "{median:.1f} ms"}),
        Column("engine's kernels", {"update_gpu_ms": "{median:.1f} ms"}),
        Column("extra memory", {"peak_extra_gib": "{max:.2f} GiB"}),
    ]
    made = table(rows, ["model", "arm", "case"], columns, "model, engine, weights")
    runs = max(row["n"] for row in rows)
    environment = results["environment"]
    end = f"{facts(environment, gpus=environment['count'])}. Medians of {runs} (least to most)."
    return joined(made, failures(results), end)
