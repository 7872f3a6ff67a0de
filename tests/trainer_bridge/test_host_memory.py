"""A bucket in host memory: opened once, read over many sessions, gone with its owner."""

import gc
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.trainer_bridge.fake_rank import TOKEN, Answer, Rank, hang_up, refuse
from trainer_bridge.engine_client import EngineError
from trainer_bridge.transport.host_memory import HostBucket
from trainer_bridge.transport.rank_client import RankClients

pytestmark = pytest.mark.timeout(60)

NBYTES = 8192


@pytest.fixture
def bucket() -> Iterator[HostBucket]:
    bucket = HostBucket(NBYTES)
    yield bucket
    bucket.close()


def connect(ranks: list[Rank]) -> RankClients:
    return RankClients([rank.path for rank in ranks], TOKEN)


def session(bucket: HostBucket, ranks: list[Rank]) -> None:
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


def test_every_rank_reads_what_is_filled_in(tmp_path: Path, bucket: HostBucket) -> None:
    ranks = [Rank(tmp_path), Rank(tmp_path)]
    bucket.content.random_(256)
    session(bucket, ranks)
    for rank in ranks:
        rank.join()
        assert rank.chunks == [bucket.content.numpy().tobytes()]
        assert rank.ops() == ["hello", "bucket", "chunk"]


def test_it_is_opened_once_and_read_over_sessions(tmp_path: Path, bucket: HostBucket) -> None:
    rank = Rank(tmp_path, sessions=3)
    for value in (1, 2, 3):
        bucket.content.fill_(value)
        session(bucket, [rank])
    rank.join()
    assert rank.chunks == [bytes([value]) * NBYTES for value in (1, 2, 3)]
    assert rank.ops() == ["hello", "bucket", "chunk", *["hello", "chunk"] * 2]


def test_it_is_shared_again_with_a_rank_that_does_not_have_it(
    tmp_path: Path, bucket: HostBucket
) -> None:
    """Such as one that started anew: then all are told, since all are told the same."""
    stays, anew = Rank(tmp_path, sessions=2), Rank(tmp_path, sessions=2)
    session(bucket, [stays, anew])
    anew.memory.close()
    bucket.content.fill_(7)
    session(bucket, [stays, anew])
    for rank in (stays, anew):
        rank.join()
        assert rank.ops() == ["hello", "bucket", "chunk"] * 2
        assert rank.chunks[1] == bytes([7]) * NBYTES


def test_another_bucket_takes_its_place(tmp_path: Path, bucket: HostBucket) -> None:
    other = HostBucket(2 * NBYTES)
    assert other.name != bucket.name
    other.content.fill_(9)
    rank = Rank(tmp_path, sessions=2)
    session(bucket, [rank])
    session(other, [rank])
    rank.join()
    assert rank.ops() == ["hello", "bucket", "chunk"] * 2
    assert rank.memory.known() == [other.name]
    assert rank.chunks[1] == bytes([9]) * 2 * NBYTES
    other.close()


def test_its_size_is_sealed(bucket: HostBucket) -> None:
    """A rank that reads past a new end would fault; the control is memory that is not sealed."""
    for size in (NBYTES // 2, 0, 2 * NBYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(bucket._memory.fd, size)
    assert os.fstat(bucket._memory.fd).st_size == NBYTES
    control = os.memfd_create("control")
    os.ftruncate(control, NBYTES)
    os.ftruncate(control, 0)
    os.close(control)


@pytest.mark.parametrize("closes", [True, False])
def test_it_is_freed_with_its_owner(closes: bool) -> None:
    before = Held()
    bucket = HostBucket(NBYTES)
    assert Held().since(before) == (2, 1)  # Python's mmap has a descriptor of its own
    if closes:
        bucket.close()
        bucket.close()
        assert Held().since(before) == (1, 1)  # its content may still be read
    del bucket
    assert Held().since(before) == (0, 0)


def test_a_rank_reads_on_when_the_owner_is_gone(tmp_path: Path) -> None:
    """What a trainer's end leaves to a rank that is in the middle of a chunk."""
    rank, bucket = Rank(tmp_path), HostBucket(NBYTES)
    bucket.content.fill_(5)
    session(bucket, [rank])
    rank.join()
    bucket.close()
    del bucket
    gc.collect()
    assert rank.read() == bytes([5]) * NBYTES


@pytest.mark.parametrize("answer", [refuse("bucket", "no memory"), hang_up("bucket")])
def test_a_rank_that_refuses_it(tmp_path: Path, bucket: HostBucket, answer: Answer) -> None:
    ranks = [Rank(tmp_path), Rank(tmp_path, answer)]
    connected = connect(ranks)
    with pytest.raises(EngineError, match=r"no memory|ended"):
        bucket.share(connected)
    connected.close()
    for rank in ranks:
        rank.join()


def test_memory_that_no_machine_has() -> None:
    before = Held()
    with pytest.raises(EngineError, match=str(1 << 62)):
        HostBucket(1 << 62)
    assert Held().since(before) == (0, 0)
