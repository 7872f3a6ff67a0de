"""The trainer's memory as one rank sees it: the bucket, and parameters that are read in place.

Both are opened once and kept from update to update.
"""

import mmap
import os
from typing import Any

import torch

from sgl_fp8rl.formats.weight_format import TensorSpec
from sgl_fp8rl.protocol.chunks import ChunkSlice
from sgl_fp8rl.protocol.cuda_memory import Handle, Mapping
from sgl_fp8rl.protocol.manifest import Manifest


class SharedMemoryError(ValueError):
    """A chunk whose memory is missing, or is not what was announced."""


class Bucket:
    """Shared bytes that chunks are laid into, half by half."""

    def __init__(self, name: str, content: torch.Tensor, mapping: Mapping | None = None) -> None:
        self.name = name
        self.content = content
        """uint8, in host memory or on the device."""
        self._mapping = mapping

    @classmethod
    def from_descriptor(cls, name: str, fds: list[int], size: int) -> "Bucket":
        """Map anonymous host memory; the map keeps a descriptor of its own."""
        actual = os.fstat(fds[0]).st_size if len(fds) == 1 else 0
        if not 0 < size <= actual:
            raise SharedMemoryError(f"the bucket is {actual} bytes but was announced as {size}")
        mapped = mmap.mmap(fds[0], size, access=mmap.ACCESS_WRITE)
        return cls(name, torch.frombuffer(mapped, dtype=torch.uint8))

    @classmethod
    def from_handle(cls, name: str, handle: Handle, device: int) -> "Bucket":
        """Map another process's device memory."""
        mapping = Mapping(handle, device)
        return cls(name, mapping.tensor, mapping)

    def tensor(self, chunk_slice: ChunkSlice, spec: TensorSpec) -> torch.Tensor:
        """The slice as a tensor of its rows."""
        return _view(self.content, chunk_slice.offset, chunk_slice, spec)

    def close(self) -> None:
        """Unmap device memory; host memory goes with its last tensor."""
        if self._mapping is not None:
            self._mapping.close()


class Segments:
    """Allocations of the trainer that hold parameters, and where each tensor lies in them."""

    def __init__(self, name: str, handles: list[Handle], places: Any, device: int) -> None:
        self.name = name
        self.places: dict[str, tuple[int, int]] = {
            tensor: (int(segment), int(offset)) for tensor, (segment, offset) in places.items()
        }
        self._mappings: list[Mapping] = []
        try:
            for handle in handles:
                self._mappings.append(Mapping(handle, device))
        except BaseException:
            self.close()
            raise

    def check(self, manifest: Manifest) -> None:
        """Check that every tensor that the manifest calls mapped lies inside its segment.

        Raises:
            SharedMemoryError: one does not.
        """
        if self.places.keys() != manifest.mapped:
            raise SharedMemoryError("the mapped tensors are not those of the manifest")
        for name, (segment, offset) in self.places.items():
            spec = manifest.tensors[name]
            inside = 0 <= segment < len(self._mappings) and offset % spec.dtype.itemsize == 0
            if not inside or not 0 <= offset <= self._mappings[segment].nbytes - spec.nbytes:
                raise SharedMemoryError(
                    f"{name} does not lie in the memory that was announced for it"
                )

    def bases(self) -> list[int]:
        """Device address of each segment."""
        return [mapping.address for mapping in self._mappings]

    def tensor(self, chunk_slice: ChunkSlice, spec: TensorSpec) -> torch.Tensor:
        """The slice as a tensor of its rows."""
        segment, offset = self.places[chunk_slice.name]
        return _view(self._mappings[segment].tensor, offset, chunk_slice, spec)

    def close(self) -> None:
        """Unmap all."""
        for mapping in self._mappings:
            mapping.close()


class SharedMemory:
    """What one rank keeps open of its trainer's memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.bucket: Bucket | None = None
        self.segments: Segments | None = None

    def known(self) -> list[str]:
        """Names of what is open, so that the trainer need not send it again."""
        return [shared.name for shared in (self.bucket, self.segments) if shared is not None]

    def open_bucket(self, message: dict[str, Any], fds: list[int]) -> None:
        """Open the bucket that a message announces, in the place of an older one."""
        self.close_bucket()
        name = str(message["name"])
        if "handle" in message:
            handle = Handle.from_json(message["handle"])
            self.bucket = Bucket.from_handle(name, handle, self._device_index())
        else:
            self.bucket = Bucket.from_descriptor(name, fds, int(message["bytes"]))

    def open_segments(self, message: dict[str, Any]) -> None:
        """Open the allocations that a message announces, in the place of older ones."""
        self.close_segments()
        handles = [Handle.from_json(handle) for handle in message["handles"]]
        self.segments = Segments(
            str(message["name"]), handles, message["places"], self._device_index()
        )

    def bucket_for(self, manifest: Manifest) -> Bucket:
        """The bucket, large enough for two chunks of this manifest."""
        if self.bucket is None:
            raise SharedMemoryError("a chunk came before the bucket; open the bucket first")
        if self.bucket.content.numel() < 2 * manifest.chunk_bytes:
            raise SharedMemoryError(
                f"the bucket holds {self.bucket.content.numel()} bytes, two chunks need "
                f"{2 * manifest.chunk_bytes}"
            )
        return self.bucket

    def mapped(self) -> Segments:
        """The segments that hold mapped tensors."""
        if self.segments is None:
            raise SharedMemoryError("a mapped chunk came before its segments; open them first")
        return self.segments

    def close_segments(self) -> None:
        """Let go of the trainer's parameters: what it frees is free again."""
        if self.segments is not None:
            self.segments.close()
            self.segments = None

    def close(self) -> None:
        """Let go of everything, as when the trainer is gone."""
        self.close_segments()
        self.close_bucket()

    def close_bucket(self) -> None:
        """Let go of the bucket: the trainer may free it."""
        if self.bucket is not None:
            self.bucket.close()
            self.bucket = None

    def _device_index(self) -> int:
        if self._device.type != "cuda":
            raise SharedMemoryError("this engine runs on a CPU; share host memory with it")
        return self._device.index or 0


def _view(
    content: torch.Tensor, start: int, chunk_slice: ChunkSlice, spec: TensorSpec
) -> torch.Tensor:
    first, last = chunk_slice.rows
    shape = (last - first, *spec.shape[1:]) if spec.shape else ()
    stop = start + torch.Size(shape).numel() * spec.dtype.itemsize
    return content[start:stop].view(spec.dtype).view(shape)
