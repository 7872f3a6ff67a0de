"""The figures that were derived from measured rows."""

import json
from functools import cache
from pathlib import Path
from typing import Any

ON_TWO_GPUS = "decode, Qwen3-32B on two GPUs"
"""Among the errors: steps whose prediction leaves communication out."""
ROLLOUTS = "rollouts of Qwen3-8B"


@cache
def figures() -> dict[str, Any]:
    """Of an H200, with their source."""
    stored: dict[str, Any] = json.loads(Path(__file__).with_name("nvidia-h200.json").read_text())
    return stored
