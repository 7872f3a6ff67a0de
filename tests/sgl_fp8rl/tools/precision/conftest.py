"""Tiny models that the tests of precision share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_fp8rl.tools.precision import tokens
from sgl_fp8rl.tools.precision.replay import Replay
from tests.engine import models

Load = Callable[..., Any]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family -> its tiny checkpoint."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp("precision") / family
            made[family] = models.make_checkpoint(family, folder)
        return made[family]

    return make


@pytest.fixture(scope="session")
def load(checkpoint: Callable[[str], Path]) -> Load:
    """Family -> a new model of it in BF16, or in another dtype."""
    from transformers import AutoModelForCausalLM

    def load(family: str, dtype: torch.dtype = torch.bfloat16) -> Any:
        return AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=dtype).eval()

    return load


TEXTS = [
    tokens.Text(list(range(first, first + length)), list(range(7, 7 + new)))
    for first, length, new in ((3, 5, 9), (50, 2, 3), (99, 8, 30))
]
"""Sequences of several lengths, so that a batch is padded."""


def replay_of(model: Any) -> Replay:
    """A replay of ``TEXTS``."""
    return Replay(model, tokens.batches_of(TEXTS, model.device))
