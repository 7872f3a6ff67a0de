"""The writer of a GPU: the routes of each chunk as device tables, written by a few launches.

No launch, no allocation and no Python for each tensor: a 30B-A3B has 18,432 expert matrices.
"""

from collections.abc import Collection, Iterable, Iterator

import torch

from sgl_fp8rl.formats import UNQUANTIZED, split_name
from sgl_fp8rl.formats.copies import Placed, Scales, describe_copy
from sgl_fp8rl.formats.weight_format import (
    NOT_FINITE,
    NOT_POSITIVE,
    NOT_POWERS,
    WEIGHT_DTYPES,
    WeightFormat,
)
from sgl_fp8rl.ops.copy_descriptors import CopyDescriptor, interleave
from sgl_fp8rl.ops.delta_scatter_triton import Scatter
from sgl_fp8rl.ops.regions import Region, strides_of, whole
from sgl_fp8rl.ops.weight_quant_triton import Launch, Status, bases_at, compile_descriptors
from sgl_fp8rl.protocol.chunks import ChunkSlice, Piece, RowRange
from sgl_fp8rl.protocol.cuda_memory import DeviceMemory, gpu_uuid
from sgl_fp8rl.protocol.manifest import Manifest
from sgl_fp8rl.receiver.routes.routes import Route, RouteTable
from sgl_fp8rl.receiver.writers.cut_blocks import CutBlock, at_blocks, in_turn
from sgl_fp8rl.receiver.writers.shared_memory import Segments, Slot
from sgl_fp8rl.receiver.writers.weight_writer import UndoLog, WeightWriter, clip_route, rows_of


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
        super().__init__(table, manifest, dtype, device, kv_scales)
        self._names = list(manifest.tensors)
        self._tags = {name: tag for tag, name in enumerate(self._names)}
        self._status = Status(device)
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        in_bucket = [i for i in range(len(self.chunks)) if not self.is_mapped(i)]
        self._launches = {i: self._compile_in_bucket(i) for i in in_bucket}
        self._memory: DeviceMemory | None = None
        self._scatters: dict[int, Scatter] = {}
        """Of each chunk, when it changes first."""
        self._mapped_places: dict[str, list[Piece]] | None = None
        self._joined: torch.Tensor | None = None
        """Where blocks are put together that several of the trainer's ranks hold."""

    def begin(self) -> None:
        super().begin()
        self._status.reset()
        self._events.clear()

    def write(self, index: int, source: Slot | Segments) -> None:
        self._defer(index, source)
        if isinstance(source, Segments):
            self._follow(index, source)
            joined = [] if self._joined is None else [self._joined.data_ptr()]
            # it stays as it is until ``finish``
            self._launch(index, [*source.bases(), *joined])
            return
        if index not in self._launches:  # of a stream, whose chunks are not known before
            self._launches[index] = self._compile_in_bucket(index)
        if source.content.is_cuda:
            self._run(index, source)
            return
        stage = self.stage(index)
        stage.content.copy_(source.content)
        self._run(index, stage)

    def _new_stage(self) -> torch.Tensor:
        # from the driver: torch's allocator would keep it from the engine
        self._memory = DeviceMemory(self.manifest.chunk_bytes, self._device.index)
        return self._memory.tensor

    def end(self) -> None:
        super().end()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def change(self, index: int, delta: torch.Tensor, log: UndoLog | None) -> None:
        if index not in self._scatters:
            self._scatters[index] = self._compile_scatter(index)
        there = delta.to(self._device, copy=True)
        located = self._scatters[index].locate(there)
        # before anything is written: there may be no memory
        back = None if log is None else torch.empty_like(delta, pin_memory=there.is_cuda)
        stop = self._timed()
        self.dirty = True
        located.run(self._status, checks=False)
        if log is not None and back is not None:
            log.append((index, back.copy_(there, non_blocking=True)))
        located.run(self._status, checks=True)
        stop.record()

    def check_complete(self) -> None:
        self._check_written(self._status.read()[1])

    def _check_written(self, tiles: int) -> None:
        if tiles != self._status.started:
            raise RuntimeError(
                f"{tiles} of {self._status.started} blocks were written; report this with the model"
            )

    def finish(self) -> float:
        bad, tiles = self._status.read()
        if bad is not None:
            owner, suffix = split_name(name := self._names[bad])
            fault = NOT_FINITE
            if suffix:
                rounded = self.table.kept_as(owner).power_of_two_scales
                fault = NOT_POWERS if rounded else NOT_POSITIVE
            raise ValueError(f"{name} {fault}")
        self._check_written(tiles)
        return float(sum(start.elapsed_time(stop) for start, stop in self._events)) / 1e3

    def _run(self, index: int, slot: Slot) -> None:
        # offsets count from the start of the bucket
        self._launch(index, [slot.content.data_ptr() - slot.start]).synchronize()

    def _launch(self, index: int, addresses: list[int]) -> torch.cuda.Event:
        """Start the kernels of a chunk; the event is recorded behind them."""
        bases = bases_at(addresses, self._device)
        stop = self._timed()
        self.dirty = True
        for launch in self._launches[index]:
            launch.run(bases, self._status)
        stop.record()
        return stop

    def _timed(self) -> torch.cuda.Event:
        """Record an event, and return the one to record when what follows is queued."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._events.append((start, stop))
        return stop

    def _follow(self, index: int, segments: Segments) -> None:
        """Compile the mapped chunk again where the trainer's tensors lie elsewhere than before."""
        if self._mapped_places is not segments.places:
            segments.check(self.manifest)
            self._launches[index] = self._compile_mapped(index, segments)
            self._mapped_places = segments.places

    def _compile_in_bucket(self, index: int) -> list[Launch]:
        return self._compile(
            descriptor
            for chunk_slice in self.chunks[index]
            if not self.is_deferred(chunk_slice.name)
            for descriptor in self._descriptors(
                chunk_slice.name, 0, chunk_slice.offset, chunk_slice.rows
            )
        )

    def _compile_scatter(self, index: int) -> Scatter:
        """Where the bytes of a chunk are stored; KV scales are kept, and take effect at the end."""
        start = index % self.manifest.slots * self.manifest.chunk_bytes
        descriptors = (
            descriptor
            for chunk_slice in self.chunks[index]
            for descriptor in self._stored(chunk_slice, chunk_slice.offset - start)
        )
        return Scatter(descriptors, self.manifest.chunk_bytes, self._device)

    def _stored(self, chunk_slice: ChunkSlice, offset: int) -> Iterator[CopyDescriptor]:
        """The slice, ``offset`` bytes into its chunk, and where each byte is stored."""
        name, rows, _ = chunk_slice
        if name not in self.kv_scales:
            yield from self._descriptors(name, 0, offset, rows)
            return
        kept = rows_of(self.deferred[name], chunk_slice)
        box, source = whole(tuple(kept.shape)), Placed(offset, kept.dtype, kept.stride())
        yield from describe_copy(source, box, _placed(kept), box, tag=self._tags[name])

    def _compile_mapped(self, index: int, segments: Segments) -> list[Launch]:
        descriptors: list[CopyDescriptor] = []
        cut: list[CutBlock] = []
        for name in (each.name for each in self.chunks[index] if not self.is_deferred(each.name)):
            pieces = segments.places[name]
            if (step := self._block_rows(name)) is not None:
                spec = self.manifest.tensors[name]
                pieces, blocks = at_blocks(name, pieces, step, spec.nbytes // spec.shape[0])
                cut += [block for block in blocks if self._has_rows(name, block.rows)]
            for piece in pieces:
                descriptors += self._descriptors(name, *piece)
        own = gpu_uuid(self._device.index)
        launches = self._compile(interleave(descriptors, segments.gpus, own))
        batches = in_turn(cut)
        size = max(
            (offset + block.nbytes for batch in batches for offset, block in batch), default=0
        )
        self._joined = joined_memory(size, self._device) if size else None
        for batch in batches:
            launches += self._compile(
                descriptor for offset, block in batch for descriptor in self._copies(block, offset)
            )
            launches += self._compile(
                descriptor
                for offset, block in batch
                for descriptor in self._descriptors(
                    block.name, len(segments.bases()), offset, block.rows
                )
            )
        return launches

    def _compile(self, descriptors: Iterable[CopyDescriptor]) -> list[Launch]:
        return compile_descriptors(descriptors, self._device, self.dtype)

    def _block_rows(self, name: str) -> int | None:
        """Rows of a block of a matrix that is quantized as it is written; None of another."""
        spec = self.manifest.tensors[name]
        formats = [self.table.format_of(r) for r in self.table.routes_for(name, self.manifest)]
        steps = {f.block[0] for f in formats if self._quantizes(f, spec.dtype)}
        return max(steps) if steps and len(spec.shape) == 2 else None

    def _has_rows(self, name: str, rows: RowRange) -> bool:
        """Whether this rank keeps any of these rows."""
        return any(clip_route(r, rows) for r in self.table.routes_for(name, self.manifest))

    def _copies(self, block: CutBlock, offset: int) -> Iterator[CopyDescriptor]:
        """Copies of a block's rows to where they are put together, ``offset`` bytes in."""
        assert self._joined is not None
        spec = self.manifest.tensors[block.name]
        for segment, start, (first, last) in block.parts:
            shape = (last - first, *spec.shape[1:])
            target = self._joined.data_ptr() + offset
            target += (first - block.rows[0]) * spec.nbytes // spec.shape[0]
            yield from describe_copy(
                Placed(start, spec.dtype, strides_of(shape)),
                whole(shape),
                Placed(target, spec.dtype, strides_of(shape)),
                whole(shape),
                segment=segment,
                tag=self._tags[block.name],
            )

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
                format_ = self.table.format_of(route)
                scales = None
                stored, _ = self.table.storage_of(route.parameter)
                if self._quantizes(format_, spec.dtype):
                    # what is not of this rank is written, too, and zeroed as the update finishes
                    src, dst = format_.cover_copy(src, dst, shape)
                    (start, stop), *rest = src
                    cut = (start + first, stop + first), *rest
                    format_.check_cut(name, cut, spec.shape)
                    scales = self._scales(route, format_, dst)
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
                    power_of_two=stored.power_of_two_scales,
                )

    def _scales(self, route: Route, format_: WeightFormat, dst: Region) -> Scales:
        """Where the kernel writes the scales of what it quantizes."""
        (suffix,) = format_.suffixes
        scales = self.table.parameters[route.parameter + suffix]
        return Scales(_placed(scales), format_.companion_region(suffix, dst))

    @staticmethod
    def _quantizes(format_: WeightFormat, sent: torch.dtype) -> bool:
        return format_ is not UNQUANTIZED and sent in WEIGHT_DTYPES


def joined_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """Device memory of this process."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _placed(parameter: torch.Tensor) -> Placed:
    return Placed(parameter.data_ptr(), parameter.dtype, parameter.stride())
