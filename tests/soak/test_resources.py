"""What grows is found."""

import gc
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from tests.soak import resources


def samples(
    threads: Callable[[int], float] = lambda n: 10, rss: Callable[[int], float] = lambda n: 900
) -> list[resources.Sample]:
    """One for each of 600 updates; RSS in MiB."""
    return [
        {
            "updates": n,
            "engine threads": threads(n),
            "engine descriptors": 50 + n % 3,
            "engine RSS MiB": 3000,
            "trainer RSS MiB": rss(n),
        }
        for n in range(600)
    ]


def test_growth_beyond_a_bound() -> None:
    assert resources.leaks(samples()) == []
    assert resources.leaks(samples(threads=lambda n: 10 - (n < 140))) == []
    leaking = samples(threads=lambda n: 10 + n // 60)
    assert resources.leaks(leaking) == ["engine threads grew by 5, more than 2"]
    assert resources.growth(leaking[:3]) == {}


def test_growth_that_goes_on_is_told_from_a_warm_up() -> None:
    """Within the bound of a run of 1,000 updates a week of them can take all memory."""
    per_update = 2 * resources.SLOPES["trainer RSS MiB"] / 1024  # MiB
    leaking = samples(rss=lambda n: 900 + n * per_update)
    (leak,) = resources.leaks(leaking)
    assert leak.startswith("trainer RSS MiB grew by 128 KiB an update at the end")
    assert resources.leaks(samples(rss=lambda n: 900 + min(n, 290) * per_update)) == []
    assert resources.leaks(leaking[:400]) == [], "it may be warming up"


def test_a_sample_sees_memory_descriptors_and_files(tmp_path: Path) -> None:
    gc.collect()  # what other tests left
    before = resources.sample(os.getpid(), tmp_path, "cpu", 1)
    fd = os.memfd_create("soak")
    os.ftruncate(fd, 16 << 20)
    with mmap.mmap(fd, 16 << 20) as mapped:
        mapped.write(b"x" * (16 << 20))
        (tmp_path / "left").touch()
        after = resources.sample(os.getpid(), tmp_path, "cpu", 2)
    os.close(fd)
    grown = {name: after[name] - before[name] for name in before}
    assert grown["engine descriptors"] == grown["trainer descriptors"] >= 1
    assert grown["engine shared segments"] == grown["trainer shared segments"] == 1
    assert grown["engine temporary files"] == 1
    assert grown["engine RSS MiB"] > 15
    assert grown.pop("updates") == 1
    assert set(grown) <= set(resources.BOUNDS)
