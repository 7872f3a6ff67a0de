"""What tests of several files watch."""

from typing import Any

import pytest

from trainer_bridge.transport.bucket import Bucket
from trainer_bridge.ways import carriers


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch) -> list[Bucket]:
    """All that are made."""
    made: list[Bucket] = []

    class Kept(Bucket):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(carriers, "Bucket", Kept)
    return made
