"""The trainer's memory as a rank opens it: what is taken, what is refused, and what is let go."""

import fcntl
import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_fp8rl.formats.weight_format import TensorSpec
from sgl_fp8rl.protocol.chunks import ChunkSlice
from sgl_fp8rl.protocol.cuda_memory import CudaMemoryError, Handle
from sgl_fp8rl.protocol.manifest import Manifest
from sgl_fp8rl.receiver.writers import shared_memory
from sgl_fp8rl.receiver.writers.shared_memory import (
    Bucket,
    Segments,
    SharedMemory,
    SharedMemoryError,
    Slot,
    UnreachableMemoryError,
)
from tests.sgl_fp8rl.protocol.test_framing import descriptors
from tests.sgl_fp8rl.receiver.fake_gpu import FakeDeviceMemory
from tests.sgl_fp8rl.receiver.toy import BF16

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
HANDLE = Handle("00" * 64, 4096, "GPU-00000000-0000-0000-0000-000000000000")


def sealed(nbytes: int, seals: int = fcntl.F_SEAL_SHRINK) -> int:
    """Anonymous memory as a trainer's bucket is; its descriptor."""
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.fixture
def memfd() -> Iterator[int]:
    """8 KiB."""
    fd = sealed(8192)
    yield fd
    os.close(fd)


# -- the bucket in host memory


def test_a_bucket_is_the_trainers_memory(memfd: int) -> None:
    bucket = Bucket.from_descriptor("b", [memfd], 8192)
    assert (bucket.content.dtype, bucket.content.numel()) == (torch.uint8, 8192)
    values = torch.arange(24, dtype=torch.float32)
    os.pwrite(memfd, values.numpy().tobytes(), 4096 + 64)
    spec = TensorSpec(torch.float32, (10, 3, 4))
    found = Slot(bucket.content, 0).tensor(ChunkSlice("w", (5, 7), 4096 + 64), spec)
    assert torch.equal(found, values.view(2, 3, 4))
    os.pwrite(memfd, (-values).numpy().tobytes(), 4096 + 64)  # the next chunk, in the same place
    assert torch.equal(found, -values.view(2, 3, 4))
    scalar = Slot(bucket.content, 0).tensor(
        ChunkSlice("s", (0, 1), 4096 + 68), TensorSpec(torch.float32, ())
    )
    assert (scalar.shape, scalar.item()) == ((), -1.0)


def test_what_may_shrink_is_no_bucket(tmp_path: Path) -> None:
    """A rank that reads behind a new end is killed by SIGBUS."""
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.truncate(file, 8192)
    pipe = os.pipe()
    unsealed = [sealed(8192, 0), sealed(8192, fcntl.F_SEAL_GROW), file]
    for fd in unsealed:
        with pytest.raises(SharedMemoryError, match="size is not sealed"):
            Bucket.from_descriptor("b", [fd], 8192)
    with pytest.raises(SharedMemoryError, match="is 0 bytes"):
        Bucket.from_descriptor("b", [pipe[0]], 64)
    for fd in (*unsealed, *pipe):
        os.close(fd)


def manifest(chunk_bytes: int = 4096, mapped: tuple[str, ...] = (), slots: int = 2) -> Manifest:
    tensors = {"w": TensorSpec(BF16, (8, 16)), "n": TensorSpec(torch.float32, (16,))}
    return Manifest(tensors, chunk_bytes, frozenset(mapped), slots=slots)


# -- device memory, with a fake in the place of the driver's mappings


class FakeMapping(FakeDeviceMemory):
    """Host memory that stands for another process's allocation."""

    opened: list["FakeMapping"]
    refused = ""

    def __init__(self, handle: Handle, device: int) -> None:
        if handle.ipc == self.refused:
            raise CudaMemoryError("could not be mapped")
        super().__init__(handle.nbytes, device)
        self.tensor.copy_(torch.arange(handle.nbytes))
        self.device = device
        self.opened.append(self)


@pytest.fixture
def mappings(monkeypatch: pytest.MonkeyPatch) -> list[FakeMapping]:
    """Each that was opened, in order."""
    monkeypatch.setattr(shared_memory, "Mapping", FakeMapping)
    monkeypatch.setattr(FakeMapping, "opened", [], raising=False)
    monkeypatch.setattr(FakeMapping, "refused", "")
    return FakeMapping.opened


def handle_of(nbytes: int, digit: str = "0") -> Handle:
    return Handle(digit * 128, nbytes, HANDLE.gpu)


def test_a_device_bucket_takes_the_place_of_an_older_one(mappings: list[FakeMapping]) -> None:
    shared = SharedMemory(torch.device("cuda", 3))
    shared.open_bucket({"name": "a", "handle": handle_of(8192).to_json()}, [])
    assert shared.bucket_for(manifest()).content is mappings[0].tensor
    shared.open_bucket({"name": "b", "handle": handle_of(16384).to_json()}, [])
    assert [(m.nbytes, m.device, m.closed) for m in mappings] == [(8192, 3, 1), (16384, 3, 0)]
    assert shared.known() == ["b"]
    with pytest.raises(ValueError, match="memory handle"):
        shared.open_bucket({"name": "c", "handle": {}}, [])
    assert [m.closed for m in mappings] == [1, 1]
    assert shared.known() == []


SPECS = manifest(mapped=("w", "n"))
"""w: 256 bytes of BF16; n: 64 bytes of FP32."""


def segments(places: Any) -> Segments:
    return Segments("s", [handle_of(512), handle_of(64)], places, 0)


def at(segment: int, offset: int, first: int, last: int) -> list[int]:
    """One piece, as it travels."""
    return [segment, offset, first, last]


W, N = [at(0, 0, 0, 8)], [at(1, 0, 0, 16)]
"""Each whole, at the start of a segment."""


@pytest.mark.parametrize(
    "places",
    [
        {"w": W, "n": N},
        {"w": [at(0, 256, 0, 8)], "n": N},  # up to the last byte
        {"w": [at(0, 2, 0, 8)], "n": [at(0, 260, 0, 16)]},  # aligned to their own elements
        {"w": W, "n": [at(0, 0, 0, 16)]},  # tied tensors
        {"w": [at(0, 320, 0, 6), at(1, 0, 6, 8)], "n": [at(0, 0, 0, 1), at(0, 100, 1, 16)]},
    ],
)
def test_tensors_may_lie_anywhere_inside(places: Any, mappings: list[FakeMapping]) -> None:
    shared = segments(places)
    shared.check(SPECS)
    assert shared.bases() == [mapping.address for mapping in mappings]
    for name, pieces in places.items():
        spec = SPECS.tensors[name]
        found = shared.tensor(ChunkSlice(name, (0, spec.shape[0]), -1), spec)
        assert found.shape == spec.shape
        row = spec.nbytes // spec.shape[0]
        wanted = [
            mappings[segment].tensor[offset : offset + (last - first) * row]
            for segment, offset, first, last in pieces
        ]
        assert torch.equal(found.contiguous().view(torch.uint8).view(-1), torch.cat(wanted))
        if len(pieces) == 1:  # not copied
            assert found.data_ptr() == mappings[pieces[0][0]].address + pieces[0][1]


OUTSIDE = [
    *([at(0, offset, 0, 8)] for offset in (258, -2, 1, 1 << 70)),
    *([at(segment, 0, 0, 8)] for segment in (1, 2, -1)),  # one is too small, two are not there
    [at(0, 0, 0, 4), at(0, 400, 4, 8)],  # the second piece is too long
]
NOT_ITS_ROWS = [
    [],
    [at(0, 0, 0, 7)],
    [at(0, 0, 0, 9)],
    [at(0, 0, 1, 8)],
    [at(0, 0, 0, 4), at(0, 0, 5, 8)],
    [at(0, 0, 0, 4), at(0, 0, 3, 8)],
    [at(0, 0, 4, 8), at(0, 0, 0, 4)],
    [at(0, 0, 0, 8), at(0, 0, 8, 4), at(0, 0, 4, 8)],
]


@pytest.mark.usefixtures("mappings")
@pytest.mark.parametrize(
    ("places", "fault"),
    [
        *(({"w": w, "n": N}, "w does not lie in the memory") for w in OUTSIDE),
        ({"w": W, "n": [at(1, 4, 0, 16)]}, "n does not lie in the memory"),
        ({"w": W, "n": [at(0, 258, 0, 16)]}, "n does not lie in the memory"),
        *(({"w": w, "n": N}, r"w (are not its 8 rows|does not lie)") for w in NOT_ITS_ROWS),
        *((p, "not those of the manifest") for p in ({}, {"w": W}, {"w": W, "n": N, "x": W})),
    ],
)
def test_places_are_every_row_once_in_its_segment(places: Any, fault: str) -> None:
    with pytest.raises(SharedMemoryError, match=fault):
        segments(places).check(SPECS)


@pytest.mark.parametrize(
    "places",
    [
        None,
        [],
        "w",
        *({"w": pieces} for pieces in (1, [0], [0] * 4, "0000", [[0] * 3], [[0] * 5])),
        *({"w": [[0, bad, 0, 8]]} for bad in (None, math.inf, True, "0")),
    ],
)
def test_malformed_places_open_nothing(places: Any, mappings: list[FakeMapping]) -> None:
    shared = SharedMemory(GPU)
    message = {"name": "s", "handles": [handle_of(512).to_json()], "places": places}
    with pytest.raises(SharedMemoryError, match=r"as its places|give for each piece"):
        shared.open_segments(message)
    assert mappings == []


def test_if_one_segment_cannot_be_mapped_the_others_are_let_go(
    mappings: list[FakeMapping], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeMapping, "refused", "2" * 128)
    handles = [handle_of(64, digit) for digit in "123"]
    with pytest.raises(UnreachableMemoryError, match="could not be mapped"):
        Segments("s", handles, {}, 0)
    assert [mapping.closed for mapping in mappings] == [1]


def test_segments_are_asked_for_before_they_are_read(mappings: list[FakeMapping]) -> None:
    shared = SharedMemory(GPU)
    with pytest.raises(SharedMemoryError, match="segments; open them first"):
        shared.mapped()
    message = {"handles": [handle_of(512).to_json()], "places": {"w": W, "n": [at(0, 256, 0, 16)]}}
    shared.open_segments({"name": "s", **message})
    assert shared.mapped() is shared.segments
    with pytest.raises(SharedMemoryError, match="not those of the manifest"):
        shared.mapped().check(manifest(mapped=("w",)))
    shared.open_segments({"name": "t", **message})
    assert (shared.known(), [m.closed for m in mappings]) == (["t"], [1, 0])


# -- as long as the trainer lives


def test_what_a_trainer_shared_ends_with_it(mappings: list[FakeMapping]) -> None:
    before = descriptors()
    shared = SharedMemory(GPU)
    trainers = [socket.socketpair() for _ in range(2)]
    for (ours, theirs), name in zip(trainers, "ab", strict=True):
        shared.open_bucket({"name": name, "handle": handle_of(64).to_json()}, [])
        shared.set_owner(ours)
        ours.close()  # as the rank does after its reply
        assert theirs.getblocking()
    shared.close_if_orphaned()
    trainers[0][1].close()  # the trainer before the last
    shared.close_if_orphaned()
    assert shared.known() == ["b"]
    last = trainers[1][1]
    last.shutdown(socket.SHUT_WR)
    shared.close_if_orphaned()
    shared.close_if_orphaned()
    assert (shared.known(), [m.closed for m in mappings]) == ([], [1, 1])
    assert last.recv(1) == b""  # it hears that nothing is open any more
    last.close()
    assert descriptors() == before


def test_a_failed_update_lets_the_trainer_go(mappings: list[FakeMapping]) -> None:
    shared = SharedMemory(GPU)
    ours, theirs = socket.socketpair()
    shared.set_owner(ours)
    ours.close()
    shared.close()
    assert theirs.recv(1) == b""
    theirs.close()
    shared.close_if_orphaned()
