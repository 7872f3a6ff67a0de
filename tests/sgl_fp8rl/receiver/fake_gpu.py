"""What stands for a GPU on a CPU: the kernels of updates, carried out by second, plain
implementations.

``Interpreter`` reads and writes raw addresses as the kernels do, and asserts that each lies in the
chunk's memory or in the model's.
"""

import ctypes
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sgl_fp8rl.ops import delta
from sgl_fp8rl.ops.copy_descriptors import CopyDescriptor
from sgl_fp8rl.ops.weight_quant_triton import Bases, Status
from sgl_fp8rl.protocol.chunks import Piece
from sgl_fp8rl.receiver import engine_weights
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from sgl_fp8rl.receiver.writers import triton_writer
from sgl_fp8rl.receiver.writers.shared_memory import Segments
from sgl_fp8rl.receiver.writers.triton_writer import TritonWriter
from tests import oracle
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.toy import BF16, FP8

SECONDS = 0.25
GPUS = "GPU-a", "GPU-b"
"""Of the trainer; the engine's rank is on the second."""

Spans = list[tuple[int, int]]
"""First and last address of pieces of memory that may be touched."""
Damage = Callable[[list[CopyDescriptor]], list[CopyDescriptor]]


class Interpreter:
    """What stands for the GPU: memory that may be touched, and the faults that a test plants."""

    def __init__(self) -> None:
        self.writable: Spans = []
        self.shared: Spans = []
        self.damage: Damage = list
        self.compiled = 0
        self.stages: list[FakeDeviceMemory] = []
        self.joined: list[torch.Tensor] = []
        """Memory in which cut blocks were put together."""
        self.lost_tiles = 0

    def compile_descriptors(
        self, descriptors: Iterable[CopyDescriptor], device: torch.device, dtype: torch.dtype
    ) -> list["FakeLaunch"]:
        self.compiled += 1
        return [FakeLaunch(self, self.damage(list(descriptors)), dtype)]

    @property
    def readable(self) -> Spans:
        """What the trainer shared, and staging memory."""
        return self.shared + self.staging + [span_of(tensor) for tensor in self.joined]

    @property
    def staging(self) -> Spans:
        """What is not freed yet."""
        return [span_of(stage.tensor) for stage in self.stages if not stage.closed]

    def joined_memory(self, nbytes: int, device: torch.device) -> torch.Tensor:
        stage = torch.full((nbytes,), 0xA5, dtype=torch.uint8)
        self.joined.append(stage)
        self.writable.append(span_of(stage))
        return stage


class FakeLaunch:
    """A few copies, carried out in NumPy."""

    quantize = staticmethod(oracle.quantize_weight)

    def __init__(
        self, interpreter: Interpreter, descriptors: list[CopyDescriptor], dtype: torch.dtype
    ) -> None:
        self.interpreter, self.descriptors, self.dtype = interpreter, descriptors, dtype
        self.tiles = sum(-(-m.rows // 128) * -(-m.cols // 128) for m in descriptors)

    def run(self, bases: Bases, status: Status) -> None:
        several = [bases] if isinstance(bases, int) else bases.tolist()
        status.started += self.tiles
        for descriptor in self.descriptors:
            base = several[descriptor.segment]
            size = descriptor.source_dtype.itemsize
            start = base + descriptor.source
            spans = self.interpreter.readable
            source = box(
                spans, start, descriptor.rows, descriptor.cols, descriptor.source_stride, size
            )
            x = torch.from_numpy(source.copy()).view(descriptor.source_dtype)
            self._write(descriptor, x, status)
        status.words[1] += self.tiles - self.interpreter.lost_tiles

    def _write(self, descriptor: CopyDescriptor, x: torch.Tensor, status: Status) -> None:
        writable = self.interpreter.writable + self.interpreter.staging
        is_code = descriptor.target_dtype == FP8
        quantize = is_code and descriptor.source_dtype != FP8
        assert (descriptor.scales != 0) == quantize
        x = x.to(self.dtype if quantize else descriptor.target_dtype)
        bad = ~torch.isfinite(x.float()) | (x.float() <= 0 if descriptor.positive else False)
        if bool(bad.any()):
            status.words[0] = min(int(status.words[0]), descriptor.tag)
            if quantize:  # else it is written as it is
                x = torch.nan_to_num(x.float(), 0.0, 0.0, 0.0).to(x.dtype)
        size = descriptor.target_dtype.itemsize
        shape = descriptor.rows, descriptor.cols, descriptor.target_stride
        target = box(writable, descriptor.target, *shape, size)
        if not quantize:
            target[:] = x.contiguous().view(torch.uint8).numpy().reshape(target.shape)
            return
        weight = x.float().numpy()
        codes, scale = self.quantize(weight)
        target[:] = codes.view(np.uint8)
        scales = box(writable, descriptor.scales, *scale.shape, descriptor.scale_stride, 4)
        scales[:] = np.ascontiguousarray(scale).view(np.uint8)


class FakeScatter:
    """Where bytes are stored, one by one."""

    def __init__(
        self,
        interpreter: Interpreter,
        descriptors: Iterable[CopyDescriptor],
        size: int,
        device: torch.device,
    ) -> None:
        self.interpreter, self.size = interpreter, size
        self.descriptors = interpreter.damage(list(descriptors))

    def locate(self, changes: torch.Tensor) -> "FakeScatteredDelta":
        return FakeScatteredDelta(self.interpreter, self.descriptors, changes, self.size)


class FakeScatteredDelta:
    """A delta, and which bytes it changes."""

    def __init__(
        self,
        interpreter: Interpreter,
        descriptors: list[CopyDescriptor],
        changes: torch.Tensor,
        size: int,
    ) -> None:
        self.interpreter, self.descriptors = interpreter, descriptors
        count = delta.records_of(changes, size)
        pairs = changes[: 2 * count].numpy().reshape(-1, 2).astype(np.int64)
        distances = pairs[:, 0] + 256 * pairs[:, 1]
        delta.check_distances(int(distances.sum()), int((distances == 0).sum()), size)
        self.at = np.cumsum(distances) - 1
        self.values = changes[2 * count :].numpy()

    def run(self, status: Status, *, checks: bool) -> None:
        (self._check if checks else self._exchange)(status)

    def _exchange(self, status: Status) -> None:
        status.started += 1
        if self.interpreter.lost_tiles:
            return
        for box_, record, target in self._bytes():
            upper = box_.target_dtype.itemsize - box_.source_dtype.itemsize
            assert upper == 0 or (box_.source_dtype, box_.target_dtype) == (BF16, torch.float32)
            memory = target[upper:]
            byte = int(self.at[record] - box_.source) % box_.source_dtype.itemsize
            value, old = int(self.values[record]), int(memory[byte])
            self.values[record], memory[byte] = old, value
        status.words[1] += 1

    def _check(self, status: Status) -> None:
        for box_, _, target in self._bytes():
            value = torch.from_numpy(target.copy()).view(box_.target_dtype).float()
            if not bool(torch.isfinite(value)) or (box_.positive and not bool(value > 0)):
                status.words[0] = min(int(status.words[0]), box_.tag)

    def _bytes(self) -> Iterator[tuple[CopyDescriptor, int, NDArray[np.uint8]]]:
        """Each record that is stored in a box, and the bytes of its element there."""
        for box_ in self.descriptors:
            sent, stored = box_.source_dtype.itemsize, box_.target_dtype.itemsize
            for row in range(box_.rows):
                start = box_.source + row * box_.source_stride * sent
                low, high = np.searchsorted(self.at, [start, start + box_.cols * sent])
                for record in range(low, high):
                    column = int(self.at[record] - start) // sent
                    address = box_.target + (row * box_.target_stride + column) * stored
                    spans = self.interpreter.writable
                    yield box_, record, box(spans, address, 1, 1, 1, stored)[0]


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()


def box(
    spans: Spans, address: int, rows: int, cols: int, stride: int, size: int
) -> NDArray[np.uint8]:
    """[rows, cols * size] bytes at an address, which must lie in one of the spans."""
    assert rows > 0
    assert cols > 0
    assert address % size == 0
    nbytes = ((rows - 1) * stride + cols) * size
    assert any(start <= address and address + nbytes <= stop for start, stop in spans), (
        f"{nbytes} bytes at {address:#x} are not this move's to touch"
    )
    memory = np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.uint8)
    return np.lib.stride_tricks.as_strided(
        memory, (rows, cols * size), (stride * size, 1), writeable=True
    )


class OnDevice(torch.Tensor):
    """Host memory that says that it is the device's."""

    is_cuda = True


class FakeDeviceMemory:
    """Host memory that stands for the staging slot on the device."""

    def __init__(self, nbytes: int, device: int | None) -> None:
        self.tensor = torch.full((nbytes,), 0xA5, dtype=torch.uint8)
        self.nbytes, self.address, self.closed = nbytes, self.tensor.data_ptr(), 0

    def close(self) -> None:
        self.closed += 1


def in_place(
    gpu: Interpreter | None,
    tensors: toy.Tensors,
    gap: int,
    rows: int = 1 << 20,
    nbytes: int = 1 << 20,
) -> Segments:
    """The tensors laid out in two allocations, with gaps, in pieces of so many rows."""
    segments, mappings = Segments("s", [], {}, 0), [FakeDeviceMemory(nbytes, None) for _ in "ab"]
    ends, segment = [gap] * 2, 0
    for name, tensor in tensors.items():
        pieces = segments.places[name] = list[Piece]()
        first = 0
        for part in tensor.split(rows):
            segment = 1 - segment
            raw = part.flatten().view(torch.uint8)
            pieces.append(Piece(segment, ends[segment], (first, first + len(part))))
            mappings[segment].tensor[ends[segment] :][: raw.numel()] = raw
            ends[segment] += raw.numel() + gap
            first += len(part)
    segments._mappings = mappings  # type: ignore[assignment]
    segments.gpus = [*GPUS]
    if gpu is not None:
        gpu.shared = [span_of(mapping.tensor) for mapping in mappings]
    return segments


class FakeEvent:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, stop: "FakeEvent") -> float:
        return SECONDS * 1e3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Interpreter:
    """Writers are those of a GPU, whose kernel is the interpreter."""
    interpreter = Interpreter()

    def stage(nbytes: int, device: int | None) -> FakeDeviceMemory:
        memory = FakeDeviceMemory(nbytes, device)
        memory.tensor = memory.tensor.as_subclass(OnDevice)
        interpreter.stages.append(memory)
        return memory

    monkeypatch.setattr(triton_writer, "compile_descriptors", interpreter.compile_descriptors)
    monkeypatch.setattr(triton_writer, "Scatter", partial(FakeScatter, interpreter))
    monkeypatch.setattr(triton_writer, "DeviceMemory", stage)
    monkeypatch.setattr(triton_writer, "gpu_uuid", lambda device: GPUS[1])
    monkeypatch.setattr(triton_writer, "joined_memory", interpreter.joined_memory)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(engine_weights, "writer_on", lambda device: TritonWriter)
    return interpreter


def engine(gpu: Interpreter, model: torch.nn.Module, shapes: toy.Shapes) -> EngineWeights:
    gpu.writable += [span_of(parameter) for parameter in model.parameters()]
    return toy.engine(model, shapes)


Make = Callable[[torch.nn.Module, toy.Shapes], EngineWeights]


@pytest.fixture(params=["torch", "kernels"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes an engine that writes as on a CPU, or as on a GPU whose kernels are interpreted."""
    if request.param == "torch":
        return toy.engine
    return partial(engine, request.getfixturevalue("gpu"))
