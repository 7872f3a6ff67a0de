"""The trainer's memory as one rank sees it: the bucket, and parameters that are read in place.

Both are opened once and kept from update to update.
"""

import fcntl
import mmap
import os
import select
import socket
from typing import Any, NamedTuple

import torch

from sgl_fp8rl.formats.weight_format import TensorSpec
from sgl_fp8rl.protocol.chunks import ChunkSlice, Piece, RowRange
from sgl_fp8rl.protocol.cuda_memory import CudaMemoryError, Handle, Mapping
from sgl_fp8rl.protocol.manifest import Manifest
from sgl_fp8rl.protocol.values import excerpt


class SharedMemoryError(ValueError):
    """A chunk whose memory is missing, or is not what was announced."""


class UnreachableMemoryError(SharedMemoryError):
    """The trainer's GPU memory cannot be opened by this process; host memory can."""


class Slot(NamedTuple):
    """Memory of one chunk."""

    content: torch.Tensor
    """uint8, in host memory or on the device."""
    start: int
    """Where it would begin in the bucket, in bytes."""

    def tensor(self, chunk_slice: ChunkSlice, spec: TensorSpec) -> torch.Tensor:
        """The slice as a tensor of its rows."""
        return _view(self.content, chunk_slice.offset - self.start, chunk_slice.rows, spec)


class Bucket:
    """Shared bytes that hold chunks, slot by slot."""

    def __init__(self, name: str, content: torch.Tensor, mapping: Mapping | None = None) -> None:
        self.name = name
        self.content = content
        """uint8, in host memory or on the device."""
        self._mapping = mapping

    @classmethod
    def from_descriptor(cls, name: str, fds: list[int], size: int) -> "Bucket":
        """Map anonymous host memory; the map keeps a descriptor of its own.

        Raises:
            SharedMemoryError: it is smaller than announced, or could shrink: a rank that reads
                behind its end is killed by SIGBUS.
        """
        actual = os.fstat(fds[0]).st_size if len(fds) == 1 else 0
        if not 0 < size <= actual:
            raise SharedMemoryError(f"the bucket is {actual} bytes but was announced as {size}")
        if not _seals(fds[0]) & fcntl.F_SEAL_SHRINK:
            raise SharedMemoryError(
                "the bucket's size is not sealed; install the same sgl-fp8rl on both sides"
            )
        mapped = mmap.mmap(fds[0], size, access=mmap.ACCESS_WRITE)
        return cls(name, torch.frombuffer(mapped, dtype=torch.uint8))

    @classmethod
    def from_handle(cls, name: str, handle: Handle, device: int) -> "Bucket":
        """Map another process's device memory."""
        mapping = _map(handle, device)
        return cls(name, mapping.tensor, mapping)

    def slot(self, chunk: int, manifest: Manifest) -> Slot:
        """Where a chunk lies."""
        start = chunk % manifest.slots * manifest.chunk_bytes
        return Slot(self.content[start : start + manifest.chunk_bytes], start)

    def close(self) -> None:
        """Unmap device memory; host memory goes with its last tensor."""
        if self._mapping is not None:
            self._mapping.close()


class Segments:
    """Allocations of the trainer's ranks that hold parameters, and where the rows of each tensor
    lie in them."""

    def __init__(
        self, name: str, handles: list[Handle], places: dict[str, Any], device: int
    ) -> None:
        self.name = name
        self.places = {tensor: _pieces(tensor, pieces) for tensor, pieces in places.items()}
        self.gpus = [handle.gpu for handle in handles]
        """UUID of the GPU that each lies on."""
        self._mappings: list[Mapping] = []
        try:
            for handle in handles:
                self._mappings.append(_map(handle, device))
        except BaseException:
            self.close()
            raise

    def check(self, manifest: Manifest) -> None:
        """Raise SharedMemoryError unless every row of each tensor that the manifest calls mapped
        lies in a segment."""
        if self.places.keys() != manifest.mapped:
            raise SharedMemoryError("the mapped tensors are not those of the manifest")
        for name, pieces in self.places.items():
            spec = manifest.tensors[name]
            length = spec.shape[0] if spec.shape else 1
            starts = [0, *(piece.rows[1] for piece in pieces)]
            if [piece.rows[0] for piece in pieces] != starts[:-1] or starts[-1] != length:
                raise SharedMemoryError(
                    f"the pieces of {name} are not its {length} rows, each once and in order"
                )
            row_bytes = spec.nbytes // length
            if not all(self._holds(piece, spec.dtype.itemsize, row_bytes) for piece in pieces):
                raise SharedMemoryError(
                    f"{name} does not lie in the memory that was announced for it"
                )

    def _holds(self, piece: Piece, itemsize: int, row_bytes: int) -> bool:
        segment, offset, (first, last) = piece
        if not 0 <= segment < len(self._mappings) or offset % itemsize:
            return False
        size = (last - first) * row_bytes
        return size > 0 and 0 <= offset <= self._mappings[segment].nbytes - size

    def bases(self) -> list[int]:
        """Device address of each segment."""
        return [mapping.address for mapping in self._mappings]

    def tensor(self, chunk_slice: ChunkSlice, spec: TensorSpec) -> torch.Tensor:
        """The slice as a tensor of its rows."""
        pieces = [
            _view(self._mappings[segment].tensor, offset, rows, spec)
            for segment, offset, rows in self.places[chunk_slice.name]
        ]
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat([piece.to(pieces[0].device) for piece in pieces])

    def close(self) -> None:
        """Unmap all."""
        for mapping in self._mappings:
            mapping.close()


class SharedMemory:
    """What one rank keeps open of its trainer's memory, for as long as the trainer lives."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._trainer: socket.socket | None = None
        self.bucket: Bucket | None = None
        self.segments: Segments | None = None

    def known(self) -> list[str]:
        """Names of what is open, so that the trainer need not send it again."""
        return [shared.name for shared in (self.bucket, self.segments) if shared is not None]

    def open_bucket(self, message: dict[str, Any], fds: list[int]) -> None:
        """Open the bucket that a message announces, in the place of an older one.

        Raises:
            SharedMemoryError, ValueError: a field is missing, or of another type.
            CudaMemoryError: the memory cannot be mapped.
        """
        self.close_bucket()
        name = _field(message, "name", str)
        if "handle" in message:
            handle = Handle.from_json(message["handle"])
            self.bucket = Bucket.from_handle(name, handle, self._device_index())
        else:
            self.bucket = Bucket.from_descriptor(name, fds, _field(message, "bytes", int))

    def open_segments(self, message: dict[str, Any]) -> None:
        """Open the allocations that a message announces, in the place of older ones.

        Raises:
            SharedMemoryError, ValueError: a field is missing, or of another type.
            CudaMemoryError: the memory cannot be mapped.
        """
        self.close_segments()
        name, places = _field(message, "name", str), _field(message, "places", dict)
        handles = [Handle.from_json(handle) for handle in _field(message, "handles", list)]
        self.segments = Segments(name, handles, places, self._device_index())

    def bucket_for(self, manifest: Manifest) -> Bucket:
        """The bucket, large enough for every slot of this manifest."""
        if self.bucket is None:
            raise SharedMemoryError("a chunk came before the bucket; open the bucket first")
        if self.bucket.content.numel() < manifest.bucket_bytes:
            raise SharedMemoryError(
                f"the bucket holds {self.bucket.content.numel()} bytes, its slots need "
                f"{manifest.bucket_bytes}"
            )
        return self.bucket

    def mapped(self) -> Segments:
        """The segments that hold mapped tensors."""
        if self.segments is None:
            raise SharedMemoryError("a mapped chunk came before its segments; open them first")
        return self.segments

    def set_owner(self, trainer: socket.socket) -> None:
        """Keep what is open until this trainer hangs up, and no other one."""
        self._forget_trainer()
        self._trainer = trainer.dup()

    def close_if_orphaned(self) -> None:
        """Let go of everything if the trainer has hung up, or died."""
        if self._trainer is not None:
            poll = select.poll()
            poll.register(self._trainer, select.POLLIN)
            if poll.poll(0):  # between updates it sends nothing
                self.close()

    def close_segments(self) -> None:
        """Let go of the trainer's parameters: what it frees is free again."""
        if self.segments is not None:
            self.segments.close()
            self.segments = None

    def close(self) -> None:
        """Let go of everything; then of the trainer, who may wait for that."""
        self.close_segments()
        self.close_bucket()
        self._forget_trainer()

    def close_bucket(self) -> None:
        """Let go of the bucket: the trainer may free it."""
        if self.bucket is not None:
            self.bucket.close()
            self.bucket = None

    def _forget_trainer(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None

    def _device_index(self) -> int:
        if self._device.type != "cuda":
            raise SharedMemoryError("this engine runs on a CPU; share host memory with it")
        return self._device.index or 0


def _map(handle: Handle, device: int) -> Mapping:
    try:
        return Mapping(handle, device)
    except CudaMemoryError as error:
        raise UnreachableMemoryError(str(error)) from error


def _seals(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:  # a file that cannot be sealed
        return 0


def _field(message: dict[str, Any], name: str, kind: type[Any]) -> Any:
    value = message.get(name)
    if type(value) is not kind:
        raise SharedMemoryError(
            f"an announcement of shared memory has {excerpt(value)} as its {name}; install the "
            f"same sgl-fp8rl on both sides"
        )
    return value


def _pieces(name: str, pieces: Any) -> list[Piece]:
    numbers = [int] * 4
    if not isinstance(pieces, list) or not all(
        isinstance(piece, list) and [type(number) for number in piece] == numbers
        for piece in pieces
    ):
        raise SharedMemoryError(
            f"{excerpt(name)} lies at {excerpt(pieces)}; give for each piece the index of its "
            f"allocation, an offset in bytes, its first row and the one behind its last"
        )
    return [Piece(segment, offset, (first, last)) for segment, offset, first, last in pieces]


def _view(content: torch.Tensor, start: int, rows: RowRange, spec: TensorSpec) -> torch.Tensor:
    first, last = rows
    shape = (last - first, *spec.shape[1:]) if spec.shape else ()
    stop = start + torch.Size(shape).numel() * spec.dtype.itemsize
    return content[start:stop].view(spec.dtype).view(shape)
