"""Deltas written where tensors are stored: what is there then is what a copy of the whole chunk
would have left, and what it takes to go back is right to the byte."""

from itertools import accumulate
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from sgl_fp8rl.formats.copies import Placed, describe_copy
from sgl_fp8rl.ops import delta
from sgl_fp8rl.ops.copy_descriptors import CopyDescriptor
from sgl_fp8rl.ops.delta import DeltaError
from sgl_fp8rl.ops.delta_scatter_triton import Scatter, _scatter
from sgl_fp8rl.ops.regions import Region, strides_of, view, whole
from sgl_fp8rl.ops.weight_quant_triton import Status
from sgl_fp8rl.protocol.chunks import ALIGNMENT
from sgl_fp8rl.receiver.writers import triton_writer
from tests.gpu.conftest import INTERPRETED
from tests.sgl_fp8rl.receiver import fake_gpu, test_changes, toy

gpu = fake_gpu.gpu

Tensor = torch.Tensor
FP8, BF16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32


class Part(NamedTuple):
    """A tensor of a chunk, and the boxes of it that are stored."""

    shape: tuple[int, ...]
    sent: torch.dtype
    boxes: tuple[Region, ...]
    stored: torch.dtype | None = None
    """Where it is another dtype than was sent."""
    transposed: bool = False
    positive: bool = False
    power_of_two: bool = False


CODES = Part((128, 384), FP8, (((0, 128), (128, 256)),))
PARTS = (
    CODES,
    Part((1, 3), FP32, (((0, 1), (1, 2)),), positive=True),  # its scales
    Part((70_001,), BF16, ()),  # another rank's
    Part((61, 128), BF16, (((7, 40), (0, 128)), ((40, 61), (0, 128)))),
    Part((3, 40), BF16, (((0, 3), (0, 40)),), stored=FP32),
    Part((), FP32, ((),)),
    Part((6, 80), BF16, (((0, 6), (0, 80)),), transposed=True),
    Part((300, 64), BF16, (((0, 300), (0, 64)),) * 2),  # stored twice
    Part((3, 32, 100), FP8, (((1, 3), (0, 32), (50, 100)), ((0, 3), (0, 32), (0, 50)))),
    Part((5, 7), torch.float16, (((0, 5), (0, 7)),)),
    Part((2, 3), FP32, (((0, 2), (0, 3)),), positive=True, power_of_two=True),
)
CONTENT = [torch.Size(part.shape).numel() * part.sent.itemsize for part in PARTS]
"""Bytes of each."""
*OFFSETS, SIZE = accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in CONTENT), initial=0)
PLANTED = [
    *((0, torch.nan), (1, torch.nan), (1, 0.0), (1, -1.0), (1, 2.0**49), (2, torch.nan)),
    *((3, torch.inf), (4, -torch.inf), (5, torch.nan), (7, torch.nan), (9, torch.inf)),
    *((10, 3.0), (10, -2.0), (10, 0.0)),
]
"""A part and a bad value, which is not seen where nothing is stored of it."""


class Storage:
    """The boxes of all parts, each in memory of its own between bytes that are nobody's."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.memory: list[Tensor] = []
        descriptors: list[CopyDescriptor] = []
        for number, (part, offset) in enumerate(zip(PARTS, OFFSETS, strict=True)):
            for box in part.boxes:
                target = self._new(part, box)
                placed = Placed(target.data_ptr(), target.dtype, target.stride())
                source = Placed(offset, part.sent, strides_of(part.shape))
                shape = whole(tuple(target.shape))
                descriptors += describe_copy(
                    *(source, box, placed, shape),
                    positive=part.positive,
                    tag=number,
                    power_of_two=part.power_of_two,
                )
        self.scatter = Scatter(descriptors[::-1], SIZE, device)

    def _new(self, part: Part, box: Region) -> Tensor:
        shape = [stop - start for start, stop in box]
        if part.transposed:
            shape = shape[::-1]
        dtype = part.stored or part.sent
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        self.memory.append(torch.full((nbytes + 2 * ALIGNMENT,), 0xA5, dtype=torch.uint8))
        self.memory[-1] = self.memory[-1].to(self.device)
        inside = self.memory[-1][ALIGNMENT : ALIGNMENT + nbytes].view(dtype).view(shape)
        return inside.T if part.transposed else inside

    def expected(self, chunk: Tensor) -> list[Tensor]:
        """The memory that a copy of a chunk would leave."""
        found = []
        for number, part in enumerate(PARTS):
            sent = tensor_of(chunk, number)
            for box in part.boxes:
                values = view(sent, box).to(part.stored or part.sent)
                content = (values.T if part.transposed else values).contiguous()
                edge = torch.full((ALIGNMENT,), 0xA5, dtype=torch.uint8)
                found.append(torch.cat([edge, content.view(-1).view(torch.uint8), edge]))
        return found

    def set(self, chunk: Tensor) -> None:
        for mine, wanted in zip(self.memory, self.expected(chunk), strict=True):
            mine.copy_(wanted)

    def holds(self, chunk: Tensor) -> bool:
        pairs = zip(self.memory, self.expected(chunk), strict=True)
        return all(torch.equal(mine.cpu(), wanted) for mine, wanted in pairs)

    def write(self, changes: Tensor, *, checks: bool = True) -> tuple[int | None, Tensor]:
        """Write a delta; returns the part that has a bad value, and the delta that goes back."""
        status, there = Status(self.device), changes.to(self.device, copy=True)
        located = self.scatter.locate(there)
        located.run(status, checks=False)
        if checks:
            located.run(status, checks=True)
        bad, done = status.read()
        assert done == status.started == (1 + checks) * located.records.programs
        return bad, there.cpu()


def tensor_of(chunk: Tensor, number: int) -> Tensor:
    part, offset = PARTS[number], OFFSETS[number]
    return chunk[offset : offset + CONTENT[number]].view(part.sent).view(part.shape)


def a_chunk(seed: int) -> Tensor:
    """Positive values; between the tensors are bytes of nobody."""
    generator = torch.Generator().manual_seed(seed)
    chunk = torch.zeros(SIZE, dtype=torch.uint8)
    for number, part in enumerate(PARTS):
        values = torch.rand(part.shape, generator=generator) + 0.01
        tensor_of(chunk, number).copy_(values.log2().ceil().exp2() if part.power_of_two else values)
    return chunk


def mixed(old: Tensor, seed: int, share: float) -> Tensor:
    """A chunk that has some elements of another one."""
    new, other = old.clone(), a_chunk(seed)
    generator = torch.Generator().manual_seed(seed)
    for number, part in enumerate(PARTS):
        mine, theirs = (tensor_of(chunk, number) for chunk in (new, other))
        drawn = torch.rand(part.shape, generator=generator) < share
        mine.copy_(torch.where(drawn, theirs.float(), mine.float()).to(part.sent))
    return new


def difference(old: Tensor, new: Tensor) -> Tensor:
    with mock.patch.object(delta, "WORTH", 9.0):  # whatever it saves
        found = delta.difference(old, new)
    assert found is not None
    return found


@pytest.fixture
def storage(device: str) -> Storage:
    return Storage(device)


@pytest.mark.parametrize("share", [0.0, 0.002, 0.1, 0.4])
def test_what_is_stored_is_what_was_sent(storage: Storage, share: float) -> None:
    old = a_chunk(0)
    storage.set(old)
    assert storage.holds(old)
    for seed in (1, 2):
        new = mixed(old, seed, share)
        found = difference(old, new)
        bad, back = storage.write(found)
        assert bad is None and storage.holds(new)
        assert storage.write(back)[0] is None and storage.holds(old)


def test_each_byte_by_itself(storage: Storage) -> None:
    """The first of each tensor, and the one before."""
    old = a_chunk(0)
    storage.set(old)
    for offset in [*OFFSETS, SIZE]:
        for byte in {max(offset - 1, 0), min(offset, SIZE - 1)}:
            new = old.clone()
            new[byte] ^= 1
            _, back = storage.write(difference(old, new), checks=False)
            assert storage.holds(new)
            storage.write(back, checks=False)
            assert storage.holds(old)


@pytest.mark.parametrize(("number", "value"), PLANTED)
def test_bad_values_are_found_and_undone(storage: Storage, number: int, value: float) -> None:
    old = a_chunk(0)
    new = mixed(old, 1, 0.05)
    boxes = PARTS[number].boxes
    tensor_of(new, number)[tuple(start for start, _ in boxes[0]) if boxes else (3,)] = value
    storage.set(old)
    bad, back = storage.write(difference(old, new))
    assert bad == (number if boxes else None)
    # as bytes: a NaN is not widened to the same one by each conversion
    storage.write(back)
    assert storage.holds(old)


def test_a_bad_value_beside_the_box_is_not_this_ranks(storage: Storage) -> None:
    old = a_chunk(0)
    new = old.clone()
    tensor_of(new, 0)[3, 127] = torch.nan
    storage.set(old)
    assert storage.write(difference(old, new))[0] is None
    assert storage.holds(old)


def test_a_delta_of_other_bytes_writes_nothing(storage: Storage) -> None:
    old, more = a_chunk(0), torch.ones(1, dtype=torch.uint8)
    storage.set(old)
    longer = torch.cat([old, 0 * more]), torch.cat([mixed(old, 1, 0.1), more])
    with pytest.raises(DeltaError, match="does not fit"):
        storage.write(difference(*longer))
    assert storage.holds(old)


def test_control_a_box_elsewhere_is_seen(storage: Storage) -> None:
    old, new = a_chunk(0), mixed(a_chunk(0), 1, 0.01)
    storage.set(old)
    storage.scatter._table[0, 4] += CODES.sent.itemsize
    storage.write(difference(old, new))
    assert not storage.holds(new)


@pytest.mark.skipif(not INTERPRETED, reason="test_delta.py has engines on a GPU")
@pytest.mark.parametrize(("rank", "tp"), [(0, 1), (1, 2)])
def test_what_a_rank_stores(rank: int, tp: int, request: pytest.FixtureRequest) -> None:
    """Its own table of boxes, with whole updates by the stand-in for their kernel."""
    made = test_changes.Rank("kernels", rank, tp, request)
    patch = request.getfixturevalue("monkeypatch")
    patch.setattr(triton_writer, "Scatter", Scatter)
    before, after = (toy.quantized(t) for t in (toy.checkpoint(0), test_changes.stepped(1)))
    test_changes.commit(made.weights, before)
    for is_undone in (True, False):
        session = toy.begin(made.weights, after, 1, test_changes.SMALL)
        test_changes.change(session, before, after)
        if is_undone:
            session.undo()
            made.weights.resume()
            assert made.holds(toy.checkpoint(0))
    session.finish()
    assert made.holds(test_changes.stepped(1))


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
def test_no_delta_compiles_anew_or_spills(storage: Storage) -> None:
    for share in (0.001, 0.01, 0.3):
        storage.set(a_chunk(0))
        storage.write(difference(a_chunk(0), mixed(a_chunk(0), 1, share)))
    made = [each for cache in _scatter.device_caches.values() for each in cache[0].values()]
    assert len(made) == 2 and not any(each.n_spills for each in made)
