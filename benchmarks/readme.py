"""Fill the measured blocks of README and docs: ``python -m benchmarks.readme``."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.run import RESULTS
from benchmarks.tables import (
    beside_stock,
    fp8_forward,
    headline,
    kv,
    plan,
    sharded,
)
from benchmarks.tables import engines as engine_tables
from benchmarks.tables import kernels as kernel_tables

PLAN = ROOT / "sgl_fp8rl" / "tools" / "plan"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
"""A block may stand on any of them, once."""
BLOCK = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


BLOCKS: dict[str, tuple[str | Path, Callable[[Any], str]]] = {
    "update": ("update.json", engine_tables.update),
    "update_moe": ("update_moe.json", engine_tables.update),
    "fp8_forward": ("fp8_forward.json", fp8_forward.fp8_forward),
    "fp8_mismatch": ("fp8_mismatch.json", fp8_forward.mismatch),
    "sharded": ("sharded.json", sharded.sharded),
    "sharded_four": ("sharded_four.json", sharded.sharded),
    "sharded_others": ("sharded_others.json", sharded.sharded),
    "sharded_each": ("sharded_each.json", sharded.sharded),
    "kv_prefill": ("kv_prefill.json", kv.prefill),
    "kv_decode": ("kv_decode.json", kv.decode),
    "headline_decode_moe": ("rollout_moe.json", headline.decode),
    "headline_rollout": ("long_tail.json", headline.rollout),
    "headline_turns": ("multi_turn.json", headline.turns),
    "headline_update": ("update.json", headline.update),
    "decode": ("rollout_decode.json", beside_stock.decode),
    "best_stock": ("rollout_decode.json", beside_stock.both),
    "best_stock_moe": ("rollout_moe.json", beside_stock.both),
    "memory_80gb": (PLAN / "nvidia-h200.json", plan.capacities),
    "plan_example": (PLAN / "nvidia-h200.json", plan.example),
    "rollout_16_bits": ("rollout_16_bits.json", engine_tables.rollout),
    "plan_errors": (PLAN / "nvidia-h200.json", plan.errors),
    "rollout_moe": ("rollout_moe.json", engine_tables.rollout),
    "rollout_two_gpus": ("rollout_two_gpus.json", beside_stock.both),
    "multi_turn": ("multi_turn.json", engine_tables.whole_rollouts),
    "long_tail": ("long_tail.json", engine_tables.whole_rollouts),
    "kernels": ("kernels.json", kernel_tables.kernels),
}
"""What each block is made from, a file of ``RESULTS`` unless its whole path is given, and how."""


def filled(match: re.Match[str]) -> str:
    """A block made from its result file.

    Raises:
        FileNotFoundError: there is none; the block would never be compared with anything.
    """
    file, make = BLOCKS[match[2]]
    return f"{match[1]}{make(read(RESULTS / file))}\n{match[3]}"


def read(path: Path) -> Any:
    """What a block is made from."""
    return json.loads(path.read_text())


def main() -> None:
    for page in PAGES:
        page.write_text(BLOCK.sub(filled, page.read_text()))


if __name__ == "__main__":
    main()
