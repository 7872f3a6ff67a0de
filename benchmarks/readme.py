"""Write the measured blocks of README and docs from the result files.

python -m benchmarks.readme
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import (
    alarm_tables,
    correction_tables,
    demo,
    headline,
    kernel_tables,
    kv_tables,
    mitigations_tables,
    performance_picture,
    performance_tables,
)
from benchmarks.markdown_tables import cell
from benchmarks.parity import picture, tables

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TABLES = ROOT / "sgl_fp8rl" / "gemm" / "tables"
PERFORMANCE = ROOT / "docs" / "performance.md"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
"""A block may stand on any of them, once."""
BLOCK = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def update(text: str) -> str:
    """One table a model: how long a full weight update takes, in each arm."""
    content = json.loads(text)
    e, rows = content["environment"], content["rows"]
    lines: list[str] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        lines += [
            f"| {model} | update | faster than stock | floor | engine's kernels | of copy "
            f"| extra memory |",
            "|---|---|---|---|---|---|---|",
        ]
        mine = [row for row in rows if row["model"] == model]
        lines += [_update_line(mine, *arm) for arm in dict.fromkeys(map(_arm, mine))]
        lines.append("")
    updates = max(row["n"] for row in rows)
    pairs = {(row["arm"], row["model"]) for row in rows}
    absent = [
        f"{arm} on {model}"
        for model in dict.fromkeys(row["model"] for row in rows)
        for arm in dict.fromkeys(row["arm"] for row in rows)
        if (arm, model) not in pairs
    ]
    lines.append(
        f"`{e['command']}`: wall time of a full update, median of {updates} (least to most), "
        f"trainer and engine on one {e['device']}, driver {e['driver']}, SGLang {e['sglang']}, "
        f"torch {e['torch']}, FlashInfer {e['flashinfer']}, {e['date']}, commit {e['commit']}. "
        f"Faster than stock: against the best stock BF16 case. Floor: the bytes that the path must "
        f"read and write, at the bandwidth of a copy in the same run ({e['copy_tb_s']:.2f} TB/s); "
        f"of copy: the quantize kernels' share of it. Extra memory: most that the device held "
        f"beyond the engine and the trainer's weights, a bucket that is kept included."
        + (f" Not run: {', '.join(absent)}." if absent else "")
    )
    return "\n".join(lines)


def _arm(row: dict[str, Any]) -> tuple[str, str]:
    return row["arm"], row["case"]


def _update_line(rows: list[dict[str, Any]], arm: str, case: str) -> str:
    """One arm's line; ``rows``: those of its model."""
    metrics = {row["metric"]: row for row in rows if _arm(row) == (arm, case)}
    if "failure" in metrics:
        return _failed(metrics["failure"], columns=7)
    wall = metrics["update_wall_ms"]
    stock = [ratio for name, ratio in wall["ratios"].items() if name.startswith("stock-bf16,")]
    ours = not arm.startswith("stock")
    cells = [
        f"{arm}, {case}",
        f"{wall['median']:.1f} ms ({wall['min']:.1f} to {wall['max']:.1f})",
        f"{min(stock):.2f}x" if ours and stock else "",
        f"{metrics['update_floor_ms']['median']:.1f} ms",
        cell(metrics, "update_gpu_ms", "{:.1f} ms"),
        cell(metrics, "quantize_copy_fraction", "{:.0%}"),
        f"{metrics['peak_extra_gib']['max']:.2f} GiB",
    ]
    return f"| {' | '.join(cells)} |"


def _failed(row: dict[str, Any], columns: int) -> str:
    """The line of an arm without figures."""
    sentence = row["sentence"].replace("|", "\\|")
    return f"| {row['arm']}, {row['case']} | fails: {sentence} |{' |' * (columns - 2)}"


def start(text: str) -> str:
    """How long the start of an engine takes, and what it compiles."""
    content = json.loads(text)
    e, rows = content["environment"], content["rows"]
    lines = [
        "| start | `Engine()` | of which DeepGEMM's warm-up | kernels compiled | after the start |",
        "|---|---|---|---|---|",
    ]
    for arm in dict.fromkeys(map(_arm, rows)):
        metrics = {row["metric"]: row for row in rows if _arm(row) == arm}
        lines.append(_start_line(metrics))
    imports = [row["median"] for row in rows if row["metric"] == "import_s"]
    layers = {row["layers"] for row in rows if row["metric"] == "start_s"}
    on = e["engine"]
    prefill = on["cuda_graph_backend_prefill"]
    lines += [
        "",
        f"`{e['command']}`: one start each of the Qwen3-8B shape with dummy weights, each in a "
        f"process of its own, on one {e['device']}, driver {e['driver']}, SGLang {e['sglang']}, "
        f"torch {e['torch']}, FlashInfer {e['flashinfer']}, {e['date']}, commit {e['commit']}. "
        + (f"{max(layers)} layers, " if layers else "")
        + f"CUDA graphs up to batch size {on['cuda_graph_max_bs_decode']}, prefill graphs "
        f"{'off' if prefill == 'disabled' else prefill}, attention backend "
        f"{on['attention_backend']}, {on['chunked_prefill_size']} tokens a chunk, SGLang's warm-up "
        f"request {'off' if on['skip_server_warmup'] else 'on'}, FlashInfer's caches kept. After "
        f"the start: kernels compiled while prompts of 1 to 4096 tokens and batches of 1 to 40 "
        f"were served."
        + (
            f" Importing SGLang before it took {min(imports):.1f} to {max(imports):.1f} s."
            if imports
            else ""
        ),
    ]
    return "\n".join(lines)


def _start_line(metrics: dict[str, dict[str, Any]]) -> str:
    """One start's line."""
    if "failure" in metrics:
        return _failed(metrics["failure"], columns=5)
    took = metrics["start_s"]
    cells = [
        f"{took['arm']}, {took['case']}",
        f"{took['median']:.1f} s",
        cell(metrics, "deep_gemm_s", "{:.1f} s"),
        cell(metrics, "kernels_compiled", "{:.0f}"),
        cell(metrics, "kernels_compiled_after_start", "{:.0f}"),
    ]
    return f"| {' | '.join(cells)} |"


BLOCKS: dict[str, tuple[str | Path, Callable[[str], str]]] = {
    **demo.BLOCKS,
    "update": ("update.json", update),
    "start": ("start.json", start),
    "kv": ("kv.json", kv_tables.speed),
    "kv_accuracy": ("kv.json", kv_tables.accuracy),
    "alarms": ("alarms.json", alarm_tables.faults),
    "alarm_margins": ("alarms.json", alarm_tables.margins),
    "correction": ("correction.json", correction_tables.times),
    "correction_gpu": ("correction_gpu.json", correction_tables.times),
    "headline_decode": ("rollout.json", headline.decode),
    "headline_rollout": ("long_tail.json", headline.rollout),
    "headline_update": ("update.json", headline.update),
    **tables.BLOCKS,
    "decode": ("rollout.json", performance_tables.summary),
    "rollout": ("rollout.json", performance_tables.rollout),
    "long_tail": ("long_tail.json", performance_tables.tables),
    "decode_profile": ("decode_profile.json", performance_tables.decode_profile),
    "decode_profile_moe": ("decode_profile_moe.json", performance_tables.decode_profile),
    "mitigations": ("mitigations.json", mitigations_tables.mitigations),
    "kernels": ("kernels.json", kernel_tables.kernels),
    "products": (TABLES / "nvidia-h200.json", kernel_tables.products),
    "products_tuned": (TABLES / "nvidia-h200-flashinfer.json", kernel_tables.products),
}
"""What each block is made from, a file of ``RESULTS`` unless its whole path is given, and how."""


def filled(match: re.Match[str]) -> str:
    """A block made from its result file, or left as it is where there is none."""
    file, make = BLOCKS[match[2]]
    path = RESULTS / file
    return f"{match[1]}{make(path.read_text())}\n{match[3]}" if path.exists() else match[0]


def main() -> None:
    for page in PAGES:
        page.write_text(BLOCK.sub(filled, page.read_text()))
    measured = RESULTS / "rollout.json"
    if measured.exists():
        performance_picture.draw(
            measured.read_text(), PERFORMANCE.parent / performance_tables.PICTURE
        )
    measured = RESULTS / "parity.jsonl"
    if measured.exists():
        picture.draw(measured.read_text(), picture.PICTURE)


if __name__ == "__main__":
    main()
