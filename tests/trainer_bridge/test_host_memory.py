"""A bucket in host memory: opened once, read over many sessions, gone with its owner."""

import gc
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.trainer_bridge.fake_rank import TOKEN, Rank
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.transport.bucket import Bucket
from trainer_bridge.transport.rank_client import RankClients

pytestmark = pytest.mark.timeout(60)

NBYTES = 8192


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    bucket = Bucket(NBYTES)
    yield bucket
    bucket.close()


def connect(ranks: list[Rank]) -> RankClients:
    return RankClients([rank.path for rank in ranks], TOKEN)


def session(bucket: Bucket, ranks: list[Rank]) -> None:
    """One session of a trainer that shares its bucket and sends a chunk."""
    connected = connect(ranks)
    bucket.share(connected)
    connected.ask({"op": "chunk"})
    connected.close()


class Held:
    """Descriptors and maps that this process has of buckets, each by its inode.

    By inode, since threads of other tests may still let go of theirs.
    """

    def __init__(self) -> None:
        gc.collect()
        self.descriptors: Counter[int] = Counter()
        for entry in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # closed since it was listed
                if "fp8rl-bucket" in str(entry.readlink()):
                    self.descriptors[entry.stat().st_ino] += 1
        lines = Path("/proc/self/maps").read_text().splitlines()
        self.maps = Counter(int(line.split()[4]) for line in lines if "fp8rl-bucket" in line)

    def since(self, before: "Held") -> tuple[int, int]:
        """How many descriptors and maps are new."""
        return (self.descriptors - before.descriptors).total(), (self.maps - before.maps).total()


def test_its_size_is_sealed(bucket: Bucket) -> None:
    """A rank that reads past a new end would fault; the control is memory that is not sealed."""
    for size in (NBYTES // 2, 0, 2 * NBYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(bucket._fds[0], size)
    assert os.fstat(bucket._fds[0]).st_size == NBYTES
    control = os.memfd_create("control")
    os.ftruncate(control, NBYTES)
    os.ftruncate(control, 0)
    os.close(control)


@pytest.mark.parametrize("closes", [True, False])
def test_it_is_freed_with_its_owner(closes: bool) -> None:
    before = Held()
    bucket = Bucket(NBYTES)
    assert Held().since(before) == (2, 1)  # Python's mmap has a descriptor of its own
    if closes:
        bucket.close()
        bucket.close()
        assert Held().since(before) == (1, 1)  # its content may still be read
    del bucket
    assert Held().since(before) == (0, 0)


def test_a_rank_reads_on_when_the_owner_is_gone(tmp_path: Path) -> None:
    """What a trainer's end leaves to a rank that is in the middle of a chunk."""
    rank, bucket = Rank(tmp_path), Bucket(NBYTES)
    bucket.content.fill_(5)
    session(bucket, [rank])
    rank.join()
    bucket.close()
    del bucket
    gc.collect()
    assert rank.read() == bytes([5]) * NBYTES


def test_memory_that_no_machine_has() -> None:
    before = Held()
    with pytest.raises(EngineError, match=str(1 << 62)):
        Bucket(1 << 62)
    assert Held().since(before) == (0, 0)
