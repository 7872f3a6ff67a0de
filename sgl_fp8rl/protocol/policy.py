"""Which policy an engine serves: the run of a trainer, and a version that grows within it."""

from typing import NamedTuple

RUN_LENGTH = 64
"""The most characters of a run's name; replies carry it."""


class Policy(NamedTuple):
    """One policy of one run. Versions of different runs have no order."""

    run: str
    version: int

    def __str__(self) -> str:
        return f"version {self.version} of run {self.run!r}"


CHECKPOINT = Policy("", -1)
"""The weights that an engine starts with; updates of a run count from 0."""
