"""Fill the measured blocks of README and docs: ``python -m benchmarks.readme``."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.parity import picture, tables
from benchmarks.run import RESULTS
from benchmarks.tables import alarms as alarm_tables
from benchmarks.tables import correction, headline, kv, pictures
from benchmarks.tables import engines as engine_tables
from benchmarks.tables import kernels as kernel_tables
from benchmarks.tables.markdown import Column, joined, table
from examples.grpo import report

TABLES = ROOT / "sgl_fp8rl" / "gemm" / "tables"
PERFORMANCE = ROOT / "docs" / "performance.md"
PARITY = ROOT / "docs" / "parity.md"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
"""A block may stand on any of them, once."""
BLOCK = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def grpo(text: str) -> str:
    """The demo's closing table."""
    rows = [json.loads(line) for line in text.splitlines()]
    first, summaries = rows[0], report.summaries(rows)
    for summary in summaries:
        summary |= {"metric": "run", "update_ms": report.milliseconds(summary["update_s"])}
    columns = {
        "reward before": "{before:.2f}",
        "after": "{after:.2f}",
        "mismatch KL (k3, nats)": "{mismatch_kl_k3:.1e}",
        "ESS": "{ess:.4f}",
        "update": "{update_ms} ms",
        "read in place": "{mapped:.0%}",
        "rollout": "{tokens_per_s:.0f} tokens/s",
    }
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    return joined(
        table(
            summaries,
            ["arm"],
            [Column(head, {"run": form}) for head, form in columns.items()],
            "rollouts",
        ),
        f"{first['parameters'] / 1e6:.1f} M parameters, {first.get('device', report.CPU)}, "
        f"{versions}, {first['date'][:10]}. KL and ESS are means over {first['steps']} steps, "
        f"times are medians.",
    )


BLOCKS: dict[str, tuple[str | Path, Callable[[Any], str]]] = {
    "grpo": ("grpo.jsonl", grpo),
    "grpo_gpu": ("grpo_gpu.jsonl", grpo),
    "update": ("update.json", engine_tables.update),
    "start": ("start.json", engine_tables.start),
    "kv": ("kv.json", kv.speed),
    "kv_accuracy": ("kv.json", kv.accuracy),
    "alarms": ("alarms.json", alarm_tables.faults),
    "alarm_margins": ("alarms.json", alarm_tables.margins),
    "correction": ("correction.json", correction.correction),
    "correction_gpu": ("correction_gpu.json", correction.correction),
    "headline_decode": ("rollout.json", headline.decode),
    "headline_rollout": ("long_tail.json", headline.rollout),
    "headline_update": ("update.json", headline.update),
    "headline_learning": ("parity.jsonl", headline.learning),
    "decode": ("rollout.json", engine_tables.decode),
    "rollout": ("rollout.json", engine_tables.rollout),
    "long_tail": ("long_tail.json", engine_tables.long_tail),
    "decode_profile": ("decode_profile.json", engine_tables.decode_profile),
    "decode_profile_moe": ("decode_profile_moe.json", engine_tables.decode_profile),
    "mitigations": ("mitigations.json", engine_tables.mitigations),
    "kernels": ("kernels.json", kernel_tables.kernels),
    "parity": ("parity.jsonl", tables.rewards),
    "parity_tests": ("parity.jsonl", tables.tests),
    "parity_mismatch": ("parity.jsonl", tables.mismatch),
    "parity_alarms": ("parity.jsonl", tables.alarms),
    "parity_timing": ("parity.jsonl", tables.timing),
    "gemms": (TABLES / "nvidia-h200.json", kernel_tables.gemms),
    "gemms_tuned": (TABLES / "nvidia-h200-flashinfer.json", kernel_tables.gemms),
}
"""What each block is made from, a file of ``RESULTS`` unless its whole path is given, and how: from
the content of a ``.json`` file, from the text of a ``.jsonl`` file."""


def filled(match: re.Match[str]) -> str:
    """A block made from its result file, or left as it is where there is none."""
    file, make = BLOCKS[match[2]]
    path = RESULTS / file
    return f"{match[1]}{make(read(path))}\n{match[3]}" if path.exists() else match[0]


def read(path: Path) -> Any:
    """What a block is made from."""
    text = path.read_text()
    return json.loads(text) if path.suffix == ".json" else text


def main() -> None:
    for page in PAGES:
        page.write_text(BLOCK.sub(filled, page.read_text()))
    measured = RESULTS / "rollout.json"
    if measured.exists():
        pictures.draw(read(measured), PERFORMANCE.parent / engine_tables.PICTURE)
    measured = RESULTS / "parity.jsonl"
    if measured.exists():
        picture.draw(read(measured), PARITY.parent / tables.PICTURE)


if __name__ == "__main__":
    main()
