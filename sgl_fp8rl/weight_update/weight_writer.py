"""Writers: how a manifest is written on one rank, planned once and replayed at each update."""

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Protocol

import torch

from sgl_fp8rl.formats.weight_format import TensorSpec
from sgl_fp8rl.ops import delta
from sgl_fp8rl.protocol.chunks import ChunkSlice, Cutter, cut_into_chunks
from sgl_fp8rl.protocol.manifest import Manifest, ManifestError
from sgl_fp8rl.protocol.values import excerpt
from sgl_fp8rl.weight_update.routes import RouteTable
from sgl_fp8rl.weight_update.shared_memory import SharedMemory, Slot
from sgl_fp8rl.weight_update.torch_writer import has_nan, read_tensor, write_tensor


class WeightWriter:
    """The chunks of a manifest, written slice by slice in plain torch.

    Args:
        kv_scales: names that no route leads to, since they are KV scales.

    Raises:
        ManifestError: the manifest cannot be cut into chunks.
    """

    def __init__(
        self,
        table: RouteTable,
        manifest: Manifest,
        dtype: torch.dtype,
        kv_scales: Collection[str] = (),
    ) -> None:
        self.table = table
        self.manifest = manifest
        self.dtype = dtype
        self.kv_scales = frozenset(kv_scales)
        self._cutter = Cutter(manifest) if manifest.streamed else None
        self.chunks = self._cutter.chunks if self._cutter else cut_into_chunks(manifest)
        self._deferred: dict[int, list[ChunkSlice]] = {}
        self.dirty = False
        """Whether this update wrote to engine storage; before that, the old version is whole."""
        self._stage: torch.Tensor | None = None
        self.kept: Mapping[str, torch.Tensor] = {}
        """What the update that committed last brought of what is deferred."""

    @cached_property
    def reads_back(self) -> bool:
        """Whether storage tells what was sent, to the last byte: FP32 holds each BF16 or FP16
        number, codes are not the weights that were quantized, and SGLang's loader is not known."""
        if self.manifest.streamed or self.table.fallback:
            return False
        return all(
            self.table.parameters[route.parameter].dtype in (spec.dtype, _holder_of(spec.dtype))
            for name, spec in self.manifest.tensors.items()
            if name not in self.kv_scales
            for route in self.table.routes_for(name, self.manifest)
        )

    def is_deferred(self, name: str) -> bool:
        """Whether this tensor is not written chunk by chunk."""
        return name in self.table.fallback or name in self.kv_scales

    def deferred(self, index: int) -> list[ChunkSlice]:
        """Slices of a chunk that are kept until the end: for SGLang's loader, or KV scales."""
        if index not in self._deferred:  # looked for once: a chunk can have 18,000 slices
            self._deferred[index] = [p for p in self.chunks[index] if self.is_deferred(p.name)]
        return self._deferred[index]

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

    def chunk_source(self, index: int, memory: SharedMemory) -> "ChunkSource":
        """Where the slices of a chunk lie.

        Raises:
            SharedMemoryError: the memory is not there, or too small.
        """
        if self.is_mapped(index):
            return memory.mapped()
        return memory.bucket_for(self.manifest).slot(index, self.manifest)

    def begin(self) -> None:
        """Get ready for another update."""
        self.dirty = False

    def write(self, index: int, source: "ChunkSource") -> None:
        """Write one chunk through its routes; a slot may be reused on return, and the trainer's own
        memory after ``finish``.

        Raises:
            ValueError: NaN or Inf, where it is known at once.
        """
        for chunk_slice in self.chunks[index]:
            if not self.is_deferred(chunk_slice.name):
                tensor = source.tensor(chunk_slice, self.manifest.tensors[chunk_slice.name])
                routes = self.table.routes_for(chunk_slice.name, self.manifest)
                self.dirty = True
                write_tensor(self.table, routes, tensor, chunk_slice.rows, self.dtype)

    def changed(self, index: int, change: torch.Tensor) -> tuple[Slot, torch.Tensor]:
        """Make a chunk of what is stored and of what changes in it. Bytes that this rank keeps
        nothing of are any; nothing is written.

        Args:
            change: a delta, in host memory.

        Returns:
            the chunk, until the next one is made, and the delta that goes back, in host memory.

        Raises:
            DeltaError: the delta does not fit a chunk.
        """
        slot = self.stage(index)
        self._read(index, slot)
        for chunk_slice in self.deferred(index):
            name = chunk_slice.name
            kept = rows_of(self.kept[name], chunk_slice)
            slot.tensor(chunk_slice, self.manifest.tensors[name]).copy_(kept)
        change = change.to(slot.content.device)
        return slot, delta.undoing(change, self._apply(slot.content, change))

    def check_widened(self, index: int, slot: Slot) -> None:
        """Check a chunk that is to be written for what could not be undone: a NaN that is stored in
        another dtype than it was sent in does not come back byte for byte.

        Raises:
            ValueError: NaN.
        """
        for chunk_slice in self._widened[index]:
            name = chunk_slice.name
            tensor = slot.tensor(chunk_slice, self.manifest.tensors[name])
            routes = self.table.routes_for(name, self.manifest)
            if has_nan(routes, tensor, chunk_slice.rows):
                raise ValueError(f"{name} holds NaN; check the trainer's weights")

    @cached_property
    def _widened(self) -> list[list[ChunkSlice]]:
        """Slices of each chunk that are stored in another dtype than they are sent in; looked for
        once, as those that are deferred."""
        names = {
            name
            for name, spec in self.manifest.tensors.items()
            if not self.is_deferred(name)
            for route in self.table.routes_for(name, self.manifest)
            if self.table.parameters[route.parameter].dtype != spec.dtype
        }
        return [[each for each in chunk if each.name in names] for chunk in self.chunks]

    def stage(self, index: int) -> Slot:
        """Memory for a chunk where weights are stored: one, until ``end``."""
        if self._stage is None:
            self._stage = self._new_stage()
        return Slot(self._stage, index % self.manifest.slots * self.manifest.chunk_bytes)

    def end(self) -> None:
        """Free what an update needed."""
        self._stage = None

    def _new_stage(self) -> torch.Tensor:
        return torch.empty(self.manifest.chunk_bytes, dtype=torch.uint8)

    def _read(self, index: int, slot: Slot) -> None:
        for chunk_slice in self.chunks[index]:
            if not self.is_deferred(chunk_slice.name):
                tensor = slot.tensor(chunk_slice, self.manifest.tensors[chunk_slice.name])
                routes = self.table.routes_for(chunk_slice.name, self.manifest)
                read_tensor(self.table, routes, tensor, chunk_slice.rows)

    def _apply(self, content: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
        return delta.apply(content, change)

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


def _holder_of(sent: torch.dtype) -> torch.dtype:
    """A dtype that holds each number of what was sent."""
    return torch.float32 if sent in (torch.bfloat16, torch.float16) else sent


class ChunkSource(Protocol):
    """Memory that holds the slices of a chunk."""

    def tensor(self, chunk_slice: ChunkSlice, spec: TensorSpec) -> torch.Tensor:
        """The slice as a tensor of its rows."""
