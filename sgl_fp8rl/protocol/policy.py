"""Which policy an engine serves: the run of a trainer, and a version that grows within it."""

from typing import Any, NamedTuple

from sgl_fp8rl.protocol.manifest import ManifestError
from sgl_fp8rl.protocol.values import excerpt

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


def check_policy(run: Any, version: Any) -> Policy:
    """The policy that an update will make; ManifestError if these are none."""
    # replies carry it as a 64-bit integer
    if type(version) is not int or not 0 <= version < 2**63:
        raise ManifestError(
            f"version is {excerpt(version)}; give a whole number from 0 up, below 2**63"
        )
    if type(run) is not str or not 0 < len(run) <= RUN_LENGTH or not run.isprintable():
        raise ManifestError(
            f"run is {excerpt(run)}; give a name of 1 to {RUN_LENGTH} printable characters"
        )
    return Policy(run, version)
