"""What the engine tests share: tiny checkpoints, one for each policy."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine import models

UPDATES = 5
Policies = Callable[[str], list[Path]]
"""Family -> its checkpoints: the one that engines start with, and one for each update."""


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    made: dict[str, list[Path]] = {}

    def make(family: str) -> list[Path]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            start = models.make_checkpoint(family, folder / "0")
            later = [models.perturb(start, folder / str(n), n) for n in range(1, UPDATES + 1)]
            made[family] = [start, *later]
        return made[family]

    return make
