"""Plans: how a manifest is written on one rank, worked out once and replayed at each update."""

from collections.abc import Collection
from typing import Protocol

import torch

from sgl_fp8rl.weight_update.apply import apply
from sgl_fp8rl.weight_update.manifest import Manifest, TensorSpec
from sgl_fp8rl.weight_update.memory import SharedMemory
from sgl_fp8rl.weight_update.parts import Piece, cut_into_parts
from sgl_fp8rl.weight_update.routes import RouteTable


class Plan:
    """The parts of a manifest, written piece by piece in plain torch.

    Args:
        kv_scales: names that no route leads to, since they are KV scales.

    Raises:
        ManifestError: the manifest cannot be cut into parts.
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
        self.parts = cut_into_parts(manifest)
        self.held = [[p for p in part if self.is_held(p.name)] for part in self.parts]
        """Pieces that are kept until the end, by part: for SGLang's loader, or KV scales."""

    def is_held(self, name: str) -> bool:
        """Whether this tensor is not written part by part."""
        return name in self.table.fallback or name in self.kv_scales

    @property
    def uses_bucket(self) -> bool:
        """Whether any part travels through the bucket."""
        return any(not self.is_mapped(index) for index in range(len(self.parts)))

    def is_mapped(self, index: int) -> bool:
        """Whether this part lies in the trainer's own memory."""
        return bool(self.manifest.mapped) and index == len(self.parts) - 1

    def source(self, index: int, memory: SharedMemory) -> "Source":
        """Where the pieces of a part lie.

        Raises:
            SharedMemoryError: the memory is not there, or too small.
        """
        if self.is_mapped(index):
            return memory.mapped()
        return memory.bucket_for(self.manifest)

    def begin(self) -> None:
        """Get ready for another update."""

    def write(self, index: int, memory: SharedMemory) -> None:
        """Write one part through its routes; its memory may be reused on return.

        Raises:
            ValueError: NaN or Inf, where it is known at once.
        """
        source = self.source(index, memory)
        for piece in self.parts[index]:
            if not self.is_held(piece.name):
                tensor = source.tensor(piece, self.manifest.tensors[piece.name])
                routes = self.table.routes_for(piece.name, self.manifest)
                apply(self.table, routes, tensor, piece.rows, self.dtype)

    def finish(self) -> float | None:
        """Hold that all that was written is sound.

        Returns:
            seconds that the GPU took to write the update, or None on a CPU.

        Raises:
            ValueError: NaN or Inf.
        """
        return None


class Source(Protocol):
    """Memory that holds the pieces of a part."""

    def tensor(self, piece: Piece, spec: TensorSpec) -> torch.Tensor:
        """The piece as a tensor of its rows."""


def plan_for(
    table: RouteTable,
    manifest: Manifest,
    dtype: torch.dtype,
    device: torch.device,
    kv_scales: Collection[str] = (),
) -> Plan:
    """The plan for the device that the weights are on."""
    if device.type == "cuda":
        from sgl_fp8rl.weight_update.grouped import GroupedPlan

        return GroupedPlan(table, manifest, dtype, device, kv_scales)
    return Plan(table, manifest, dtype, kv_scales)
