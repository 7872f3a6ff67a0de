"""The writer of a GPU: the routes of each chunk as device tables, written by a few launches.

No launch, no allocation and no Python for each tensor: a 30B-A3B has 18,432 expert matrices.
"""

from collections.abc import Callable, Collection, Iterator
from itertools import product

import torch

from sgl_fp8rl.ops.copy_descriptors import CopyDescriptor
from sgl_fp8rl.ops.reference import FP8_DTYPE
from sgl_fp8rl.ops.weight_quant_triton import Launch, Status, compile_descriptors
from sgl_fp8rl.protocol.chunks import ChunkSlice
from sgl_fp8rl.protocol.cuda_memory import DeviceMemory
from sgl_fp8rl.protocol.manifest import SCALE_SUFFIX, Manifest
from sgl_fp8rl.weight_update.routes import Region, RouteTable, to_blocks
from sgl_fp8rl.weight_update.shared_memory import Segments, SharedMemory
from sgl_fp8rl.weight_update.torch_writer import clip_route
from sgl_fp8rl.weight_update.weight_writer import WeightWriter

Locate = Callable[[ChunkSlice], tuple[int, int]]
"""(segment, byte offset) of a slice."""
Dimension = tuple[int, int, int]
"""(length, source stride, target stride), in elements."""


class TritonWriter(WeightWriter):
    """Chunks compiled into tables for ``ops.weight_quant_triton``."""

    def __init__(
        self,
        table: RouteTable,
        manifest: Manifest,
        dtype: torch.dtype,
        device: torch.device,
        kv_scales: Collection[str] = (),
    ) -> None:
        super().__init__(table, manifest, dtype, kv_scales)
        self._device = device
        self._names = list(manifest.tensors)
        self._tags = {name: tag for tag, name in enumerate(self._names)}
        self._status = Status(device)
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        in_bucket = [i for i in range(len(self.chunks)) if not self.is_mapped(i)]
        self._launches = {i: self._compile(i, lambda p: (0, p.offset)) for i in in_bucket}
        self._mapped_places: dict[str, tuple[int, int]] | None = None

    def begin(self) -> None:
        self._status.reset()
        self._events.clear()

    def write(self, index: int, memory: SharedMemory) -> None:
        if self.is_mapped(index):
            segments = memory.mapped()
            self._follow(index, segments)
            self._run(index, segments.bases())
            return
        bucket = memory.bucket_for(self.manifest)
        if bucket.content.is_cuda:
            self._run(index, [bucket.content.data_ptr()])
            return
        start = index % 2 * self.manifest.chunk_bytes
        stage = DeviceMemory(self.manifest.chunk_bytes, self._device.index)
        try:
            stage.tensor.copy_(bucket.content[start : start + self.manifest.chunk_bytes])
            # offsets count from the start of the bucket, of which the stage is one half
            self._run(index, [stage.address - start])
        finally:
            stage.close()

    def finish(self) -> float:
        bad, tiles = self._status.read()
        if bad is not None:
            raise ValueError(
                f"{self._names[bad]} holds NaN or Inf, or a scale that is not positive; check the "
                f"trainer's weights before the update"
            )
        if tiles != self._status.started:
            raise RuntimeError(
                f"{tiles} of {self._status.started} blocks were written; report this with the model"
            )
        return float(sum(start.elapsed_time(stop) for start, stop in self._events)) / 1e3

    def _run(self, index: int, bases: list[int]) -> None:
        on_device = torch.tensor(bases, dtype=torch.int64).to(self._device)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for launch in self._launches[index]:
            launch.run(on_device, self._status)
        stop.record()
        stop.synchronize()
        self._events.append((start, stop))

    def _follow(self, index: int, segments: Segments) -> None:
        """Compile the mapped chunk again where the trainer's tensors lie elsewhere than before."""
        if self._mapped_places is not segments.places:
            segments.check(self.manifest)
            self._launches[index] = self._compile(index, lambda p: segments.places[p.name])
            self._mapped_places = segments.places

    def _compile(self, index: int, locate: Locate) -> list[Launch]:
        descriptors = (
            descriptor
            for chunk_slice in self.chunks[index]
            for descriptor in self._descriptors(chunk_slice, *locate(chunk_slice))
        )
        return compile_descriptors(descriptors, self._device, self.dtype)

    def _descriptors(
        self, chunk_slice: ChunkSlice, segment: int, offset: int
    ) -> Iterator[CopyDescriptor]:
        if self.is_deferred(chunk_slice.name):
            return
        spec = self.manifest.tensors[chunk_slice.name]
        first, last = chunk_slice.rows
        shape = (last - first, *spec.shape[1:]) if spec.shape else ()
        for route in self.table.routes_for(chunk_slice.name, self.manifest):
            clipped = clip_route(route, chunk_slice.rows)
            if clipped is None:
                continue
            target = self.table.parameters[route.parameter]
            quantize = target.dtype == FP8_DTYPE and spec.dtype != FP8_DTYPE
            scales = self.table.parameters[route.parameter + SCALE_SUFFIX] if quantize else None
            yield from _descriptors_of_box(
                CopyDescriptor(
                    segment=segment,
                    source=offset,
                    target=target.data_ptr(),
                    scales=scales.data_ptr() if scales is not None else 0,
                    rows=0,
                    cols=0,
                    source_stride=0,
                    target_stride=0,
                    scale_stride=scales.shape[-1] if scales is not None else 0,
                    source_dtype=spec.dtype,
                    target_dtype=target.dtype,
                    positive=self.manifest.is_scale(chunk_slice.name),
                    tag=self._tags[chunk_slice.name],
                ),
                *clipped,
                strides_of(shape),
                target.stride(),
                scales.stride() if scales is not None else (),
            )


def _descriptors_of_box(
    descriptor: CopyDescriptor,
    src: Region,
    dst: Region,
    src_strides: tuple[int, ...],
    dst_strides: tuple[int, ...],
    scale_strides: tuple[int, ...],
) -> Iterator[CopyDescriptor]:
    """Cut a box into matrices: one copy for each."""
    dimensions = _dimensions(src, dst, src_strides, dst_strides)
    scale_steps: list[int] = []
    if descriptor.scales:
        # the last two dimensions are the matrix that blocks are cut from; others may be experts
        lead, (rows, cols) = dimensions[:-2], dimensions[-2:]
        steps = _dimensions(src, dst, src_strides, scale_strides)[:-2]
        scale_steps = [step for _, _, step in steps]
    else:
        *lead, rows, cols = [(1, 0, 0), (1, 0, 0), *_merged(dimensions)]
        lead = [d for d in lead if d[0] != 1]
        if (cols[1], cols[2]) != (1, 1):  # a single column
            lead, rows, cols = [*lead, rows], cols, (1, 1, 1)
            lead = [d for d in lead if d[0] != 1]
    source = descriptor.source + _offset(src, src_strides) * descriptor.source_dtype.itemsize
    target = descriptor.target + _offset(dst, dst_strides) * descriptor.target_dtype.itemsize
    scales = (
        descriptor.scales + 4 * _offset(to_blocks(dst), scale_strides) if descriptor.scales else 0
    )
    for index in product(*(range(length) for length, _, _ in lead)):
        yield descriptor._replace(
            source=source + _dot(index, [d[1] for d in lead]) * descriptor.source_dtype.itemsize,
            target=target + _dot(index, [d[2] for d in lead]) * descriptor.target_dtype.itemsize,
            scales=scales + 4 * _dot(index, scale_steps) if descriptor.scales else 0,
            rows=rows[0],
            cols=cols[0],
            source_stride=rows[1],
            target_stride=rows[2],
        )


def _dimensions(
    src: Region, dst: Region, src_strides: tuple[int, ...], dst_strides: tuple[int, ...]
) -> list[Dimension]:
    """The dimensions of both boxes, paired from the last; missing ones have length 1."""
    width = max(len(src), len(dst))

    def padded(region: Region, strides: tuple[int, ...]) -> list[tuple[int, int]]:
        lengths = [stop - start for start, stop in region]
        given = list(zip(lengths, strides, strict=True))
        return [(1, 0)] * (width - len(given)) + given

    sources, targets = padded(src, src_strides), padded(dst, dst_strides)
    if [length for length, _ in sources] == [length for length, _ in targets]:
        return [(n, s, t) for (n, s), (_, t) in zip(sources, targets, strict=True)]
    # a dimension of length 1 stands elsewhere on one side, as an expert does in a stack
    long_sources = [(n, s) for n, s in sources if n != 1]
    long_targets = [(n, t) for n, t in targets if n != 1]
    return [(n, s, t) for (n, s), (_, t) in zip(long_sources, long_targets, strict=True)]


def _merged(dimensions: list[Dimension]) -> list[Dimension]:
    """Join neighbours that are contiguous on both sides; dimensions of length 1 are dropped."""
    merged: list[Dimension] = []
    for length, source, target in dimensions:
        if length == 1:
            continue
        if merged and merged[-1][1:] == (length * source, length * target):
            length *= merged.pop()[0]
        merged.append((length, source, target))
    return merged or [(1, 1, 1)]


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _offset(region: Region, strides: tuple[int, ...]) -> int:
    return _dot([start for start, _ in region], strides)


def _dot(a: tuple[int, ...] | list[int], b: tuple[int, ...] | list[int]) -> int:
    return sum(x * y for x, y in zip(a, b, strict=True))
