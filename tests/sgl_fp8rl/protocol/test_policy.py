"""Names of policies, as other processes send them."""

from typing import Any

import pytest

from sgl_fp8rl.protocol.manifest import ManifestError, check_policy
from sgl_fp8rl.protocol.policy import RUN_LENGTH, Policy


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def test_a_run_and_a_version() -> None:
    run = "r" * RUN_LENGTH
    assert check_policy(run, 3) == Policy(run, 3)


@pytest.mark.parametrize("version", [-1, True, 1.0, "1", None, [1], nested(5000), 2**63])
def test_a_version_is_a_whole_number_from_0(version: Any) -> None:
    with pytest.raises(ManifestError, match=r"version is .*whole number") as refusal:
        check_policy("a run", version)
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("run", ["[" * 50_000, nested(5000), "", "two\nlines", None, 7])
def test_a_refusal_is_a_short_sentence(run: Any) -> None:
    """Whatever came in the place of a name."""
    with pytest.raises(ManifestError, match=r"run is .*name") as refusal:
        check_policy(run, 3)
    assert len(str(refusal.value)) < 300
