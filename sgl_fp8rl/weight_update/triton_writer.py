"""The writer of a GPU: the routes of each chunk as device tables, written by a few launches.

No launch, no allocation and no Python for each tensor: a 30B-A3B has 18,432 expert matrices.
"""

from collections.abc import Callable, Collection, Iterator

import torch

from sgl_fp8rl.formats import UNQUANTIZED
from sgl_fp8rl.formats.copies import Placed, Scales, describe_copy
from sgl_fp8rl.formats.weight_format import TensorSpec, WeightFormat
from sgl_fp8rl.ops.copy_descriptors import CopyDescriptor
from sgl_fp8rl.ops.regions import Region, strides_of
from sgl_fp8rl.ops.weight_quant_triton import Launch, Status, bases_at, compile_descriptors
from sgl_fp8rl.protocol.chunks import ChunkSlice, Piece, RowRange
from sgl_fp8rl.protocol.cuda_memory import DeviceMemory
from sgl_fp8rl.protocol.manifest import Manifest
from sgl_fp8rl.weight_update.routes import Route, RouteTable
from sgl_fp8rl.weight_update.shared_memory import Segments, SharedMemory
from sgl_fp8rl.weight_update.torch_writer import clip_route
from sgl_fp8rl.weight_update.weight_writer import WeightWriter

Locate = Callable[[ChunkSlice], list[Piece]]
"""Where the rows of a slice lie."""


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
        self._launches = {i: self._compile_in_bucket(i) for i in in_bucket}
        self._mapped_places: dict[str, list[Piece]] | None = None

    def begin(self) -> None:
        super().begin()
        self._status.reset()
        self._events.clear()

    def write(self, index: int, memory: SharedMemory) -> None:
        if self.is_mapped(index):
            segments = memory.mapped()
            self._follow(index, segments)
            self._launch(index, segments.bases())  # it stays as it is until ``finish``
            return
        bucket = memory.bucket_for(self.manifest)
        if index not in self._launches:  # of a stream, whose chunks are not known before
            self._launches[index] = self._compile_in_bucket(index)
        if bucket.content.is_cuda:
            self._run(index, [bucket.content.data_ptr()])
            return
        start = index % self.manifest.slots * self.manifest.chunk_bytes
        stage = DeviceMemory(self.manifest.chunk_bytes, self._device.index)
        try:
            stage.tensor.copy_(bucket.content[start : start + self.manifest.chunk_bytes])
            # offsets count from the start of the bucket, of which the stage is one slot
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

    def _run(self, index: int, addresses: list[int]) -> None:
        self._launch(index, addresses).synchronize()

    def _launch(self, index: int, addresses: list[int]) -> torch.cuda.Event:
        """Start the kernels of a chunk; the event is recorded behind them."""
        bases = bases_at(addresses, self._device)
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.dirty = True
        for launch in self._launches[index]:
            launch.run(bases, self._status)
        stop.record()
        self._events.append((start, stop))
        return stop

    def _follow(self, index: int, segments: Segments) -> None:
        """Compile the mapped chunk again where the trainer's tensors lie elsewhere than before."""
        if self._mapped_places is not segments.places:
            segments.check(self.manifest)
            self._launches[index] = self._compile(index, lambda p: segments.places[p.name])
            self._mapped_places = segments.places

    def _compile_in_bucket(self, index: int) -> list[Launch]:
        return self._compile(index, lambda p: [Piece(0, p.offset, p.rows)])

    def _compile(self, index: int, locate: Locate) -> list[Launch]:
        descriptors = (
            descriptor
            for chunk_slice in self.chunks[index]
            if not self.is_deferred(chunk_slice.name)
            for piece in locate(chunk_slice)
            for descriptor in self._descriptors(chunk_slice.name, *piece)
        )
        return compile_descriptors(descriptors, self._device, self.dtype)

    def _descriptors(
        self, name: str, segment: int, offset: int, rows: RowRange
    ) -> Iterator[CopyDescriptor]:
        spec = self.manifest.tensors[name]
        first, last = rows
        shape = (last - first, *spec.shape[1:]) if spec.shape else ()
        source = Placed(offset, spec.dtype, strides_of(shape))
        for route in self.table.routes_for(name, self.manifest):
            clipped = clip_route(route, rows)
            if clipped is not None:
                src, dst = clipped
                scales = self._scales(route, spec.dtype, dst)
                if scales is not None:
                    _check_cut(self.table.format_of(route), name, spec, src, first)
                parameter = self.table.parameters[route.parameter]
                yield from describe_copy(
                    source,
                    src,
                    _placed(parameter),
                    dst,
                    scales,
                    segment=segment,
                    positive=self.manifest.is_companion(name),
                    tag=self._tags[name],
                )

    def _scales(self, route: Route, sent: torch.dtype, dst: Region) -> Scales | None:
        """Where the kernel writes the scales of what it quantizes."""
        format_ = self.table.format_of(route)
        if format_ is UNQUANTIZED or sent in format_.dtypes:
            return None
        (suffix,) = format_.suffixes
        scales = self.table.parameters[route.parameter + suffix]
        return Scales(_placed(scales), format_.companion_region(suffix, dst))


def _check_cut(format_: WeightFormat, name: str, spec: TensorSpec, src: Region, row: int) -> None:
    """Check that a box whose first row is ``row`` of the tensor can be quantized by itself.

    Raises:
        ValueError: it cuts a block.
    """
    (start, stop), *rest = src
    try:
        format_.check_cut(((start + row, stop + row), *rest), spec.shape)
    except ValueError as error:
        raise ValueError(f"a piece of {name} {error}; cut it where blocks end") from error


def _placed(parameter: torch.Tensor) -> Placed:
    return Placed(parameter.data_ptr(), parameter.dtype, parameter.stride())
