"""What tests of several files watch."""

from typing import Any

import pytest

from trainer_bridge.ways import sender
from trainer_bridge.ways.carriers import Bucket


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch) -> list[Bucket]:
    """All that are made."""
    made: list[Bucket] = []

    class Kept(Bucket):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(sender, "Bucket", Kept)
    return made
