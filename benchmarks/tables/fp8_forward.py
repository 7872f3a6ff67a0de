"""The measured blocks of docs/fp8_forward.md."""

from collections.abc import Mapping
from typing import Any

from benchmarks.tables.markdown import Column, facts, failures, joined, table, with_ratio

MS = "{median:,.0f} ms ({min:,.0f} to {max:,.0f})"
TIMES = {"pass_ms": "pass_faster", "step_ms": "step_faster", "checkpointed_step_ms": "again_faster"}


def fp8_forward(results: Mapping[str, Any]) -> str:
    """A line for each model, batch and product, beside BF16."""
    rows = results["rows"]
    for metric, name in TIMES.items():
        rows = with_ratio(rows, metric, lambda row: row["arm"] == "bf16", name)
    columns = [
        Column("logprob pass", {"pass_ms": MS, "pass_faster": "{median:.2f}x"}),
        Column("training step", {"step_ms": MS, "step_faster": "{median:.2f}x"}),
        Column("with checkpointing", {"checkpointed_step_ms": MS, "again_faster": "{median:.2f}x"}),
        Column("peak", {"peak_gib": "{median:.1f} GiB", "step_peak_gib": "{median:.1f} GiB"}),
        Column("quantize", {"quantize_ms": "{median:.1f} ms"}),
    ]
    made = table(rows, ["model", "case", "arm"], columns, "model, batch")
    runs = max((row["n"] for row in rows), default=0)
    end = f"{facts(results['environment'])}. Medians of {runs} (least to most)."
    return joined(made, failures(results), end)


def mismatch(results: Mapping[str, Any]) -> str:
    """A line for each engine; a column for each trainer."""
    rows = results["rows"]
    steps = max((row["median"] for row in rows if row["metric"] == "steps"), default=0)
    arms = {
        "BF16 trainer": "bf16",
        "with fp8_forward": "fp8_forward",
        "and fake-quantized K and V": "fp8_forward, FP8 KV",
        f"after {steps:.0f} steps": "fp8_forward, trained",
    }
    columns = [Column(head, {"k3": "{median:.2g}"}, {"arm": arm}) for head, arm in arms.items()]
    made = table(rows, ["model", "case"], columns, "model, engine: k3 in nats")
    return joined(made, failures(results), f"{facts(results['environment'])}.")
