"""The block of docs/precision.md about the mitigations on logprobs, from
results/mitigations.json."""

import json
from typing import Any

from benchmarks.markdown_tables import Metrics, cell

MITIGATIONS = {
    "bf16": "BF16",
    "bf16-fp32-head": "BF16, FP32 head",
    "fp8": "FP8",
    "fp8-fp32-head": "FP8, FP32 head",
    "fp8-ends-bf16": "FP8, first and last layer BF16",
    "fp8-ignore-list": "FP8, ignore list",
    "fp8-kv8": "FP8, FP8 KV",
    "fp8-deterministic": "FP8, deterministic",
}
COLUMNS = (
    "k3 (nats)",
    "logprob error",
    "ESS",
    "`precision` said",
    "layers in BF16",
    "decode step",
    "of FP8's",
)


def mitigations(text: str) -> str:
    """One table a model: what each mitigation does to logprobs, and what it costs."""
    content = json.loads(text)
    e, rows = content["environment"], content["rows"]
    parts = []
    for model in dict.fromkeys(row["model"] for row in rows if row["metric"] != "failure"):
        mine = [row for row in rows if row["model"] == model]
        lines = [f"| {model} | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
        lines += [_line(mine, arm) for arm in MITIGATIONS if any(row["arm"] == arm for row in mine)]
        parts.append("\n".join(lines))
    failures = [
        f"{MITIGATIONS[row['arm']]} on {row['model']} fails: {row['sentence']}"
        for row in rows
        if row["metric"] == "failure"
    ]
    versions = ", ".join(
        f"{name} {e[key]}"
        for name, key in (("SGLang", "sglang"), ("torch", "torch"), ("FlashInfer", "flashinfer"))
        if key in e
    )
    rollouts = max((row["n"] for row in rows if row["metric"] == "mismatch_kl_k3"), default=0)
    cases = sorted({row["case"] for row in rows if row["metric"] != "failure"})
    parts += failures
    parts.append(
        f"`{e['command']}`: {e['device']}, {versions}, {e['date']}, commit {e['commit']}; "
        f"{', '.join(cases)} (sequences x prompt tokens + new ones). Medians of {rollouts} "
        f"rollouts (least to most). k3, logprob error (mean absolute) and ESS are of the tokens "
        f"that the engine sampled, against a BF16 trainer whose head is FP32."
    )
    return "\n\n".join(parts)


def _line(rows: list[dict[str, Any]], arm: str) -> str:
    """An arm's line; a cell is empty where there is no such row."""
    found: Metrics = {row["metric"]: row for row in rows if row["arm"] == arm}
    k3, step = found.get("mismatch_kl_k3"), found.get("decode_step_ms")
    slower = None
    if step is not None:
        ratios = {name.partition(",")[0]: ratio for name, ratio in step["ratios"].items()}
        slower = 1 / ratios["fp8"] if "fp8" in ratios else None
    cells = [
        f"{k3['median']:.1e} ({k3['min']:.1e} to {k3['max']:.1e})" if k3 else "",
        cell(found, "logprob_error", "{:.4f}"),
        cell(found, "mismatch_ess", "{:.4f}"),
        cell(found, "precision_kl", "{:.1e}"),
        cell(found, "bf16_layers", "{:.0f}"),
        cell(found, "decode_step_ms", "{:.2f} ms"),
        f"{slower:.2f}x" if slower else "",
    ]
    return f"| {MITIGATIONS[arm]} | {' | '.join(cells)} |"
