"""What verl's tests with a real engine share."""

from pathlib import Path

import pytest

from tests.engine import models


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """With a tied head: verl's state dict has it twice, a checkpoint once."""
    folder = tmp_path_factory.mktemp("policies")
    start = models.make_checkpoint("qwen3", folder / "0", tie_word_embeddings=True)
    return [start, models.perturb(start, folder / "1", 1)]
