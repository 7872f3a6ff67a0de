"""What grows is found."""

import mmap
import os
from pathlib import Path

from tests.soak import resources


def test_growth_beyond_a_bound() -> None:
    steady = [{"engine threads": 10.0, "engine descriptors": 50.0 + n % 3} for n in range(40)]
    assert resources.leaks(steady) == []
    warming = [{"engine threads": 10.0 - (n < 9)} for n in range(40)]
    assert resources.leaks(warming) == []
    leaking = [{"engine threads": 10.0 + n // 4} for n in range(40)]
    assert resources.leaks(leaking) == ["engine threads grew by 5, more than 2"]
    assert resources.growth(leaking[:3]) == {}


def test_a_sample_sees_memory_descriptors_and_files(tmp_path: Path) -> None:
    before = resources.sample(os.getpid(), tmp_path, "cpu")
    fd = os.memfd_create("soak")
    os.ftruncate(fd, 16 << 20)
    with mmap.mmap(fd, 16 << 20) as mapped:
        mapped.write(b"x" * (16 << 20))
        (tmp_path / "left").touch()
        after = resources.sample(os.getpid(), tmp_path, "cpu")
    os.close(fd)
    grown = {name: after[name] - before[name] for name in before}
    assert grown["engine descriptors"] == grown["trainer descriptors"] >= 1
    assert grown["engine shared segments"] == grown["trainer shared segments"] == 1
    assert grown["engine temporary files"] == 1
    assert grown["engine RSS MiB"] > 15
    assert set(before) <= set(resources.BOUNDS)
