"""Where a run's files are: ``STATE/<arm>-<seed>/``, under ``STATE/timing/`` for a timed one."""

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]

LOG = "log.jsonl"
CHECKPOINT = "checkpoint.safetensors"
FINISHED = "finished"
"""Empty; exists when the run has come to its end."""
FINAL = "final"
"""Folder of a finished run's weights, in BF16."""
JUDGED = "judged.json"
"""What ``judge.py`` found; beside a model that runs begin with as well."""
START_SETTINGS = "settings.json"
"""What a model that runs begin with was trained by, beside it."""
WARMED = "warmed"
"""Empty; exists when a model's kernels have been measured."""
TIMING = "timing"


def run_folder(state: Path, arm: str, seed: int, is_timed: bool = False) -> Path:
    """Of one run."""
    return (state / TIMING if is_timed else state) / f"{arm}-{seed}"


def start_folder(state: Path, model: str, size: str) -> Path:
    """Of the model that runs begin with."""
    return state / f"start-{model}-{size}"


def warm_up_folder(state: Path, model: str, size: str) -> Path:
    """Of a random model, whose engines are started first."""
    return state / f"warm-up-{model}-{size}"


def rows_of(log: Path) -> list[Row]:
    """All rows of a log that are whole."""
    if not log.exists():
        return []
    lines = log.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
