"""A short soak in CI: every kind of fault that a CPU can have, at least once."""

from pathlib import Path

import pytest

from tests.soak import resources
from tests.soak.drive import drive, faults_of
from tests.soak.settings import SETTINGS
from tests.soak.soak import running

UPDATES, SEED, FAULT_RATE = 30, 0, 0.7


@pytest.mark.guarantee("soak", fault="every fault, with requests in flight all the time")
@pytest.mark.engine
@pytest.mark.full
@pytest.mark.timeout(1200)
def test_a_short_soak(tmp_path: Path) -> None:
    counts: dict[str, int] = {}
    with running(SETTINGS["cpu"], SEED, tmp_path) as soak:
        drive(soak, UPDATES, counts, fault_rate=FAULT_RATE)
        assert set(counts) == set(faults_of(soak, ()))
        assert soak.heals == sum(counts.values())
        assert soak.quarantines > 0
        assert soak.judge.tokens > 0
        assert soak.judge.summary()["control told apart"] > 0.5
        grown = resources.growth(soak.samples)
        # other kinds need more samples to be told from a warm-up
        assert not {name: grown[name] for name in resources.NEVER_MORE if grown[name] > 0}
