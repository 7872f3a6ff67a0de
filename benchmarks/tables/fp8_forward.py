"""The measured blocks of docs/fp8_forward.md."""

from collections.abc import Mapping
from itertools import product
from typing import Any

from benchmarks.tables.markdown import Column, facts, failures, grid, joined, table, with_ratio

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
    """A line for each model and KV cache: what an FP8 engine adds to the mismatch that BF16 has in
    trainer and engine, and what ``fp8_forward`` leaves of it."""
    rows = results["rows"]
    steps = max((row["median"] for row in rows if row["metric"] == "steps"), default=0)
    k3 = {(r["model"], r["arm"], r["case"]): r["median"] for r in rows if r["metric"] == "k3"}
    lines = []
    for model, cache in product(dict.fromkeys(row["model"] for row in rows), ("", ", FP8 KV")):
        bf16 = k3[model, "bf16", "BF16"]
        fp8 = k3[model, "bf16", f"FP8{cache}"]
        forward = k3[model, "fp8_forward", f"FP8{cache}"]
        both = k3[model, f"fp8_forward{cache}", f"FP8{cache}"]
        after = k3.get((model, "fp8_forward, trained", f"FP8{cache}"))
        lines.append(
            [
                model,
                "FP8" if cache else "BF16",
                f"{bf16:.2g}",
                f"{fp8:.2g} ({fp8 / bf16:.0f}x)",
                f"{forward:.2g} ({forward / fp8:.0%} left)",
                f"{both:.2g} ({both / fp8:.0%} left)" if cache else "",
                f"{after:.2g}" if after else "",
            ]
        )
    head = [
        "k3 in nats",
        "KV cache",
        "BF16 trainer, BF16 engine and cache",
        "BF16 trainer, FP8 engine",
        "with fp8_forward",
        "and fake-quantized K and V",
        f"after {steps:.0f} steps",
    ]
    return joined(grid(head, lines), failures(results), f"{facts(results['environment'])}.")
