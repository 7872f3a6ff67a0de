"""Fill the measured blocks of README and docs: ``python -m benchmarks.readme``."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import demo
from benchmarks.environment import ROOT
from benchmarks.parity import dose_tables, long_tables, picture, tables
from benchmarks.parity.run_log import rows_of
from benchmarks.run import RESULTS
from benchmarks.tables import alarms as alarm_tables
from benchmarks.tables import (
    beside_stock,
    correction,
    flips,
    formats,
    fp8_forward,
    headline,
    kv,
    kv_causes,
    learning,
    links,
    memory,
    pictures,
    plan,
    pretrained,
    rounded_scales,
    sharded,
    trl,
    verl,
    verl_parity,
)
from benchmarks.tables import engines as engine_tables
from benchmarks.tables import kernels as kernel_tables

TABLES = ROOT / "sgl_fp8rl" / "gemm" / "tables"
PLAN = ROOT / "sgl_fp8rl" / "plan"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
"""A block may stand on any of them, once."""
BLOCK = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


BLOCKS: dict[str, tuple[str | Path, Callable[[Any], str]]] = {
    **demo.BLOCKS,
    **tables.BLOCKS,
    **dose_tables.BLOCKS,
    **long_tables.BLOCKS,
    **pretrained.BLOCKS,
    "update": ("update.json", engine_tables.update),
    "update_moe": ("update_moe.json", engine_tables.update),
    "update_h100": ("update_h100.json", engine_tables.update),
    "links": ("links.json", links.links),
    "far_ranks": ("far_ranks.json", links.far_ranks),
    "chain": ("chain.json", links.chain),
    "fp8_forward": ("fp8_forward.json", fp8_forward.fp8_forward),
    "fp8_mismatch": ("fp8_mismatch.json", fp8_forward.mismatch),
    "flips": ("flips.json", flips.flips),
    "formats": ("formats.json", formats.formats),
    "rounded_scales": ("rounded_scales.json", rounded_scales.rounded_scales),
    "delta": ("delta.json", links.delta),
    "delta_links": ("delta.json", links.delta_links),
    "sharded": ("sharded.json", sharded.sharded),
    "sharded_four": ("sharded_four.json", sharded.sharded),
    "sharded_8b": ("sharded_8b.json", sharded.sharded),
    "sharded_others": ("sharded_others.json", sharded.sharded),
    "sharded_each": ("sharded_each.json", sharded.sharded),
    "sharded_predicted": ("sharded.json", sharded.predicted),
    "start": ("start.json", engine_tables.start),
    "kv": ("kv.json", kv.speed),
    "kv_accuracy": ("kv.json", kv.accuracy),
    "kv_prefill": ("kv_prefill.json", kv.prefill),
    "kv_decode": ("kv_decode.json", kv.decode),
    "kv_biased": ("kv_decode.json", kv_causes.biased),
    "kv_causes": ("kv_causes.json", kv_causes.causes),
    "kv_codes": ("kv_causes.json", kv_causes.codes),
    "kv_sums": ("kv_causes.json", kv_causes.calibration),
    "alarms": ("alarms.json", alarm_tables.faults),
    "alarm_margins": ("alarms.json", alarm_tables.margins),
    "correction": ("correction.json", correction.correction),
    "correction_gpu": ("correction_gpu.json", correction.correction),
    "headline_decode_moe": ("rollout_moe_restarts.json", headline.decode),
    "headline_rollout": ("long_tail.json", headline.rollout),
    "headline_turns": ("multi_turn.json", headline.turns),
    "headline_update": ("update.json", headline.update),
    "decode": ("rollout_decode.json", beside_stock.decode),
    "best_stock": ("rollout_decode.json", beside_stock.both),
    "right_sums": ("rollout_16_bits.json", beside_stock.right),
    "best_stock_moe": ("rollout_moe_restarts.json", beside_stock.both),
    "memory_80gb": (PLAN / "nvidia-h200.json", memory.capacities),
    "plan_example": (PLAN / "nvidia-h200.json", plan.example),
    "plan_aiconfigurator": ("aiconfigurator.json", plan.beside_aiconfigurator),
    "plan_accuracy": (PLAN / "nvidia-h200.json", plan.accuracy),
    "rollout": ("rollout.json", engine_tables.rollout),
    "rollout_moe": ("rollout_moe.json", engine_tables.rollout),
    "rollout_restarts": ("rollout_restarts.json", engine_tables.rollout),
    "rollout_moe_restarts": ("rollout_moe_restarts.json", engine_tables.rollout),
    "rollout_two_gpus": ("rollout_two_gpus.json", beside_stock.both),
    "ragged_tp2": ("ragged_tp2.json", engine_tables.rollout),
    "ragged_tp4": ("ragged_tp4.json", engine_tables.rollout),
    "rollout_graphs": ("rollout_graphs.json", engine_tables.rollout),
    "rollout_deterministic": ("rollout_deterministic.json", engine_tables.rollout),
    "multi_turn": ("multi_turn.json", engine_tables.multi_turn),
    "long_tail": ("long_tail.json", engine_tables.long_tail),
    "decode_profile": ("decode_profile.json", engine_tables.decode_profile),
    "decode_profile_moe": ("decode_profile_moe.json", engine_tables.decode_profile),
    "mitigations": ("mitigations.json", engine_tables.mitigations),
    "kernels": ("kernels.json", kernel_tables.kernels),
    "trl": ("trl.jsonl", trl.table),
    "verl": ("verl.jsonl", verl.table),
    "verl_parity": ("verl_parity.jsonl", verl_parity.table),
    "gemms": (TABLES / "nvidia-h200.json", kernel_tables.gemms),
    "gemms_tuned": (TABLES / "nvidia-h200-flashinfer.json", kernel_tables.gemms),
}
"""What each block is made from, a file of ``RESULTS`` unless its whole path is given, and how: from
the content of a ``.json`` file, from the rows of a ``.jsonl`` file."""


def filled(match: re.Match[str]) -> str:
    """A block made from its result file, or left as it is where there is none."""
    file, make = BLOCKS[match[2]]
    path = RESULTS / file
    return f"{match[1]}{make(read(path))}\n{match[3]}" if path.exists() else match[0]


def read(path: Path) -> Any:
    """What a block is made from."""
    return json.loads(path.read_text()) if path.suffix == ".json" else rows_of(path)


def main() -> None:
    for page in PAGES:
        page.write_text(BLOCK.sub(filled, page.read_text()))
    measured = RESULTS / "rollout_decode.json"
    if measured.exists():
        pictures.draw(read(measured), pictures.PICTURE)
    picture.draw_all()
    for name, into in (("trl", trl.PICTURE), ("verl_parity", verl_parity.PICTURE)):
        measured = RESULTS / f"{name}.jsonl"
        if measured.exists():
            learning.draw(read(measured), into)


if __name__ == "__main__":
    main()
