"""What every way to share a bucket must do: the same tests for each of them; and host memory."""

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sgl_fp8rl.protocol.cuda_memory import CudaMemoryError, Handle
from sgl_fp8rl.receiver.relay.memory import RelayMemory
from sgl_fp8rl.receiver.relay.relay import Relay
from sgl_fp8rl.receiver.writers.shared_memory import SharedMemory
from tests.trainer_bridge import fake_ipc
from tests.trainer_bridge.fake_rank import TOKEN, Answer, Rank, hang_up, refuse
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.transport.rank_client import (
    Content,
    EngineRanks,
    RankClients,
    UnreachableMemoryError,
)
from trainer_bridge.transport.relay_client import RelayClient
from trainer_bridge.ways import carriers
from trainer_bridge.ways.carriers import Bucket

pytestmark = pytest.mark.timeout(60)

NBYTES = 8192
TIMEOUT_S = 20.0
HOST, GPU, RELAY = "host memory", "a GPU's memory", "host memory, over a relay"
NIXL = "host memory, over a relay by NIXL"


class Way:
    """One way from a trainer to the ranks of an engine."""

    def __init__(self, name: str) -> None:
        self.device = torch.device("cuda", 0) if name == GPU else None
        networks = {RELAY: "tcp", NIXL: "nixl"}
        self._memories: RelayMemory | None = None
        if name in networks:
            self._memories = RelayMemory(4 * NBYTES, network=networks[name])
        self._kept: EngineRanks | None = None

    def bucket(self, nbytes: int = NBYTES) -> Bucket:
        return Bucket(nbytes, self.device)

    def rank(self, folder: Path, *args: Answer, sessions: int = 1) -> Rank:
        made = Rank(folder, *args, sessions=sessions)
        made.memory = SharedMemory(self.device or torch.device("cpu"))
        return made

    def connect(self, ranks: list[Rank]) -> EngineRanks:
        """Begin a session."""
        paths = [rank.path for rank in ranks]
        if self._memories is None:
            return RankClients(paths, TOKEN)
        relay = Relay("127.0.0.1", TIMEOUT_S, self._memories)
        relay.start(paths, TOKEN)
        return RelayClient({"host": "127.0.0.1", "port": relay.port}, TOKEN, None, TIMEOUT_S)

    def send(self, bucket: Bucket, ranks: list[Rank]) -> None:
        """One session, with a chunk that is all of the bucket; connected until the next one ends,
        as a trainer stays."""
        connected = self.connect(ranks)
        bucket.share(connected)
        connected.send_chunk({"op": "chunk"}, Content(0, bucket.content))
        connected.wait()
        connected.ask({"op": "commit"})
        self.close()
        self._kept = connected

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()


@pytest.fixture(params=[HOST, GPU, RELAY, NIXL])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    if request.param == GPU:
        fake_ipc.install(monkeypatch)
    if request.param == NIXL:
        pytest.importorskip("nixl._api", reason="NIXL is not installed (extra nixl)")
    made = Way(request.param)
    yield made
    made.close()


@pytest.fixture
def filled(way: Way) -> Iterator[Callable[[int], Bucket]]:
    """Makes buckets of so many bytes, all of them different."""
    made: list[Bucket] = []

    def make(nbytes: int = NBYTES) -> Bucket:
        made.append(way.bucket(nbytes))
        made[-1].content.random_(256)
        return made[-1]

    yield make
    for bucket in made:
        bucket.close()


Make = Callable[..., Bucket]


def content(bucket: Bucket) -> bytes:
    return bucket.content.numpy().tobytes()


def test_it_is_opened_once_and_read_over_sessions(tmp_path: Path, way: Way, filled: Make) -> None:
    """By every rank. Where one lost it all are told again, since all are told the same; and another
    one takes its place."""
    first, second = filled(), filled(2 * NBYTES)
    assert first.name != second.name
    ranks, put = [way.rank(tmp_path, sessions=5) for _ in range(2)], []
    for number, bucket in enumerate([first] * 4 + [second]):
        if number == 3:
            ranks[1].memory.close()
        bucket.content.random_(256)
        put.append(content(bucket))
        way.send(bucket, ranks)
    for rank in ranks:
        rank.join()
        assert rank.chunks == put
        assert rank.memory.known() == [second.name]
        again, anew = ["hello", "chunk", "commit"], ["hello", "bucket", "chunk", "commit"]
        assert rank.ops() == [*anew, *again, *again, *anew, *anew]


@pytest.mark.parametrize("answer", [refuse("bucket", "no memory"), hang_up("bucket")])
def test_a_rank_that_cannot_open_it(tmp_path: Path, way: Way, filled: Make, answer: Answer) -> None:
    ranks, bucket = [way.rank(tmp_path), way.rank(tmp_path, answer)], filled()
    connected = way.connect(ranks)
    with pytest.raises(EngineError, match=r"no memory|ended"):
        bucket.share(connected)
    connected.close()
    for rank in ranks:
        rank.join()


def test_buckets_of_one_handle_have_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = driver_memory(lambda: Handle("ab" * 64, NBYTES, fake_ipc.GPU), [])
    monkeypatch.setattr(carriers, "DeviceMemory", lambda nbytes, device: memory)
    first, second = (Bucket(NBYTES, torch.device("cuda", 0)) for _ in range(2))
    assert first._message["handle"] == second._message["handle"]
    assert first.name != second.name


def driver_memory(handle: Callable[[], Handle], closed: list[bool]) -> SimpleNamespace:
    tensor = torch.empty(NBYTES, dtype=torch.uint8)
    return SimpleNamespace(close=lambda: closed.append(True), handle=handle, tensor=tensor)


def test_a_bucket_on_a_system_without_cuda_ipc(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is freed, and the caller may turn to host memory."""
    closed: list[bool] = []

    def refuse() -> Handle:
        raise CudaMemoryError("not supported")

    memory = driver_memory(refuse, closed)
    monkeypatch.setattr(carriers, "DeviceMemory", lambda nbytes, device: memory)
    with pytest.raises(UnreachableMemoryError, match="not supported") as refused:
        Bucket(NBYTES, torch.device("cuda", 0))
    del refused
    gc.collect()
    assert closed == [True]


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


def test_the_size_of_host_memory_is_sealed() -> None:
    """A rank that reads past a new end would fault; the control is memory that is not sealed."""
    bucket = Bucket(NBYTES)
    for size in (NBYTES // 2, 0, 2 * NBYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(bucket._fds[0], size)
    assert os.fstat(bucket._fds[0]).st_size == NBYTES
    control = os.memfd_create("control")
    os.ftruncate(control, NBYTES)
    os.ftruncate(control, 0)
    os.close(control)


@pytest.mark.parametrize("closes", [True, False])
def test_host_memory_is_freed_with_its_owner(closes: bool) -> None:
    before = Held()
    bucket = Bucket(NBYTES)
    assert Held().since(before) == (2, 1)  # Python's mmap has a descriptor of its own
    if closes:
        bucket.close()
        bucket.close()
        assert Held().since(before) == (1, 1)  # its content may still be read
    del bucket
    assert Held().since(before) == (0, 0)


def test_memory_that_no_machine_has() -> None:
    before = Held()
    with pytest.raises(EngineError, match=str(1 << 62)):
        Bucket(1 << 62)
    assert Held().since(before) == (0, 0)
