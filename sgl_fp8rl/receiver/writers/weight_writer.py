"""Writers: how a manifest is written on one rank, planned once and replayed at each update.

In plain torch: what the CPU platform runs, and the reference for ``triton_writer.py``.
"""

from collections.abc import Collection
from functools import cached_property

import torch

from sgl_fp8rl.formats import UNQUANTIZED
from sgl_fp8rl.ops.delta import apply, undoing
from sgl_fp8rl.ops.regions import Region, inside, view
from sgl_fp8rl.protocol.chunks import ChunkSlice, Cutter, RowRange, cut_into_chunks
from sgl_fp8rl.protocol.manifest import Manifest, ManifestError
from sgl_fp8rl.protocol.values import excerpt
from sgl_fp8rl.receiver.routes.routes import Route, RouteTable
from sgl_fp8rl.receiver.writers.shared_memory import Segments, SharedMemory, Slot

UndoLog = list[tuple[int, torch.Tensor]]
"""Chunks that change and, for each, the delta in host memory that goes back; in their order."""


class WeightWriter:
    """The chunks of a manifest, written slice by slice in plain torch.

    Args:
        device: where weights are stored.
        kv_scales: names that no route leads to, since they are KV scales.

    Raises:
        ManifestError: the manifest cannot be cut into chunks.
    """

    def __init__(
        self,
        table: RouteTable,
        manifest: Manifest,
        dtype: torch.dtype,
        device: torch.device,
        kv_scales: Collection[str] = (),
    ) -> None:
        self.table = table
        self.manifest = manifest
        self.dtype = dtype
        self.kv_scales = frozenset(kv_scales)
        self._device = device
        self._cutter = Cutter(manifest) if manifest.streamed else None
        self.chunks = self._cutter.chunks if self._cutter else cut_into_chunks(manifest)
        self._deferred_in: dict[int, list[ChunkSlice]] = {}
        self.dirty = False
        """Whether this update wrote to engine storage; before that, the old version is whole."""
        self._stage: torch.Tensor | None = None
        self.deferred = {name: self._empty(name, device) for name in self.kv_scales}
        """What this update brought and is not written chunk by chunk; KV scales stay in place."""
        self._kept: dict[str, torch.Tensor] = {}
        """The KV scales of the update that committed last."""

    @cached_property
    def holds_bytes(self) -> bool:
        """Whether storage has each byte that was sent: BF16 is the upper half of FP32, codes are
        not the weights that were quantized, and SGLang's loader is not known."""
        if self.manifest.streamed or self.manifest.mapped or self.table.fallback:
            return False
        return all(
            _holds_bytes(self.table.parameters[route.parameter].dtype, spec.dtype)
            for name, spec in self.manifest.tensors.items()
            if name not in self.kv_scales
            for route in self.table.routes_for(name, self.manifest)
        )

    def is_deferred(self, name: str) -> bool:
        """Whether this tensor is not written chunk by chunk."""
        return name in self.table.fallback or name in self.kv_scales

    def _deferred_slices(self, index: int) -> list[ChunkSlice]:
        """Slices of a chunk that are kept until the end: for SGLang's loader, or KV scales."""
        if index not in self._deferred_in:  # looked for once: a chunk can have 18,000 slices
            self._deferred_in[index] = [p for p in self.chunks[index] if self.is_deferred(p.name)]
        return self._deferred_in[index]

    @property
    def uses_bucket(self) -> bool:
        """Whether any chunk travels through the bucket."""
        return self.manifest.streamed or any(
            not self.is_mapped(index) for index in range(len(self.chunks))
        )

    def due(self) -> list[str]:
        """The tensors of a stream that did not come yet, but for those that are not kept."""
        return sorted(self._cutter.due.keys() - self.table.skipped) if self._cutter else []

    def add(self, name: str) -> None:
        """Plan the next tensor of a stream.

        Raises:
            ManifestError: it came before, is not in the manifest, or is too large for the bucket.
        """
        if self._cutter is None or name not in self._cutter.due:
            raise ManifestError(f"{excerpt(name)} is not due in a stream; send each tensor once")
        self._cutter.add(name)

    def is_mapped(self, index: int) -> bool:
        """Whether this chunk lies in the trainer's own memory."""
        return bool(self.manifest.mapped) and index == len(self.chunks) - 1

    def chunk_source(self, index: int, memory: SharedMemory) -> Slot | Segments:
        """Where the slices of a chunk lie; SharedMemoryError if it is not there, or too small."""
        if self.is_mapped(index):
            return memory.mapped()
        return memory.bucket_for(self.manifest).slot(index, self.manifest)

    def begin(self) -> None:
        """Get ready for another update."""
        self.dirty = False
        for name, kept in self._kept.items():
            self.deferred[name].copy_(kept)

    def keep(self, changes_may_come: bool) -> None:
        """Note that the update committed, and whether the next one may be changes of it."""
        names = self.kv_scales if changes_may_come else ()
        self._kept = {name: self.deferred[name].clone() for name in names}

    def write(self, index: int, source: Slot | Segments) -> None:
        """Write one chunk through its routes; a slot may be reused on return, and the trainer's own
        memory after ``finish``.

        Raises:
            ValueError: NaN or Inf, where it is known at once.
        """
        self._defer(index, source)
        for chunk_slice in self.chunks[index]:
            if not self.is_deferred(chunk_slice.name):
                tensor = source.tensor(chunk_slice, self.manifest.tensors[chunk_slice.name])
                routes = self.table.routes_for(chunk_slice.name, self.manifest)
                self.dirty = True
                write_tensor(self.table, routes, tensor, chunk_slice.rows, self.dtype)

    def change(self, index: int, delta: torch.Tensor, log: UndoLog | None) -> None:
        """Change one chunk where it is stored, through its routes.

        Args:
            delta: in host memory, which may be reused on return.
            log: takes what undoes the change, even if it fails in between; None where nobody will.

        Raises:
            DeltaError: the delta does not fit a chunk; nothing was written.
            ValueError: NaN or Inf, where it is known at once.
        """
        slot = self.stage(index)
        for chunk_slice in self.chunks[index]:
            name = chunk_slice.name
            tensor = slot.tensor(chunk_slice, self.manifest.tensors[name])
            if self.is_deferred(name):
                tensor.copy_(rows_of(self.deferred[name], chunk_slice))
            else:
                routes = self.table.routes_for(name, self.manifest)
                read_tensor(self.table, routes, tensor, chunk_slice.rows)
        replaced = apply(slot.content, delta)
        if log is not None:
            log.append((index, undoing(delta, replaced)))
        self.write(index, slot)

    def stage(self, index: int) -> Slot:
        """Memory for a chunk where weights are stored: one, until ``end``."""
        if self._stage is None:
            self._stage = self._new_stage()
        return Slot(self._stage, index % self.manifest.slots * self.manifest.chunk_bytes)

    def end(self) -> None:
        """Free what an update needed."""
        self._stage = None
        for name in self.deferred.keys() - self.kv_scales:
            del self.deferred[name]

    def _new_stage(self) -> torch.Tensor:
        return torch.empty(self.manifest.chunk_bytes, dtype=torch.uint8)

    def _defer(self, index: int, source: Slot | Segments) -> None:
        for chunk_slice in self._deferred_slices(index):
            name = chunk_slice.name
            tensor = source.tensor(chunk_slice, self.manifest.tensors[name])
            if name not in self.deferred:
                self.deferred[name] = self._empty(name, tensor.device)
            rows_of(self.deferred[name], chunk_slice).copy_(tensor)

    def _empty(self, name: str, device: torch.device) -> torch.Tensor:
        spec = self.manifest.tensors[name]
        return torch.empty(spec.shape, dtype=spec.dtype, device=device)

    def check_complete(self) -> None:
        """Raise RuntimeError if what was started is not all done: what undoes it is not known."""

    def finish(self) -> float | None:
        """Check all that was written.

        Returns:
            seconds that the GPU took to write the update, or None on a CPU.

        Raises:
            ValueError: NaN or Inf.
        """
        return None


def rows_of(whole: torch.Tensor, chunk_slice: ChunkSlice) -> torch.Tensor:
    """The slice of its tensor, which may be a scalar."""
    return whole[slice(*chunk_slice.rows)] if whole.dim() else whole


def _holds_bytes(stored: torch.dtype, sent: torch.dtype) -> bool:
    return stored == sent or (stored, sent) == (torch.float32, torch.bfloat16)


def write_tensor(
    table: RouteTable, routes: list[Route], tensor: torch.Tensor, rows: RowRange, dtype: torch.dtype
) -> None:
    """Write ``tensor``, the given rows of its source, wherever its routes lead.

    Weights that are quantized are first cast to the model's dtype, so that a BF16 checkpoint
    and an FP32 master copy of the same weights make the same codes.

    Args:
        tensor: BF16, FP16 or FP32 weights, FP8 codes, or FP32 scales.
        rows: what part of the source's first dimension ``tensor`` holds.
        dtype: the model's dtype.

    Raises:
        ValueError: a value is NaN or Inf, or a scale is not positive.
    """
    for route in routes:
        clipped = clip_route(route, rows)
        if clipped is None:
            continue
        src, dst = clipped
        target = table.parameters[route.parameter]
        values = view(tensor, src)
        format_ = table.format_of(route)
        try:
            if format_ is UNQUANTIZED or values.dtype == target.dtype:
                # before the check: a narrower dtype can overflow to Inf
                values = values.to(target.dtype)
                stored, suffix = table.storage_of(route.parameter)
                stored.check_values(suffix, values)
                _copy(view(target, dst), values)
                continue
            around, blocks = format_.cover_copy(src, dst, tuple(tensor.shape))
            encoded = format_.encode(view(tensor, around).to(target.device, dtype))
        except ValueError as error:
            raise ValueError(f"{route.source} {error}") from error
        _copy(view(target, dst), view(encoded.pop(""), inside(src, around)))
        for suffix, companion in encoded.items():
            region = format_.companion_region(suffix, blocks)
            _copy(view(table.parameters[route.parameter + suffix], region), companion)


def read_tensor(
    table: RouteTable, routes: list[Route], tensor: torch.Tensor, rows: RowRange
) -> None:
    """Fill ``tensor``, the given rows of a source, with what its routes lead to; elsewhere it stays
    as it is.

    Args:
        tensor: of the dtype that was sent, whose bytes storage holds.
    """
    for route in routes:
        if (clipped := clip_route(route, rows)) is not None:
            src, dst = clipped
            _copy(view(tensor, src), view(table.parameters[route.parameter], dst))


def clip_route(route: Route, rows: RowRange) -> tuple[Region, Region] | None:
    """The route's boxes where its source box meets the rows; the source box relative to them."""
    if not route.src:
        return route.src, route.dst  # a scalar
    (start, stop), *rest = route.src
    low, high = max(start, rows[0]), min(stop, rows[1])
    if low >= high:
        return None
    src = ((low - rows[0], high - rows[0]), *rest)
    if (low, high) == (start, stop):
        return src, route.dst
    # The rows are split, so the first dimension is longer than 1 and has its partner in the target.
    axis = next(i for i, (a, b) in enumerate(route.dst) if b - a == stop - start)
    base = route.dst[axis][0]
    dst = list(route.dst)
    dst[axis] = (base + low - start, base + high - start)
    return src, tuple(dst)


def _copy(target: torch.Tensor, values: torch.Tensor) -> None:
    target.copy_(values.reshape(target.shape))
