"""Memory of other processes in the place of GPU memory: each allocation is a file in memory.

A handle carries the process and the descriptor, by which another process of this user maps it, and
a number: descriptors are used again, and engines of an earlier job may still have theirs open.
"""

import mmap
import os
import struct
from collections.abc import Iterable
from itertools import count
from pathlib import Path

import pytest
import torch

from sgl_fp8rl.protocol.cuda_memory import CudaMemoryError, Handle
from sgl_fp8rl.protocol.place import HostMemory
from sgl_fp8rl.receiver import engine_weights
from sgl_fp8rl.receiver.writers import shared_memory, triton_writer
from sgl_fp8rl.receiver.writers.triton_writer import TritonWriter
from tests.sgl_fp8rl.receiver.fake_gpu import (
    FakeDeviceMemory,
    FakeEvent,
    Interpreter,
    OnDevice,
    span_of,
)
from tests.trainer_bridge.test_packer import without_triton
from trainer_bridge.session import transaction
from trainer_bridge.shards import placed_shards, shard_codes
from trainer_bridge.transport import cuda_ipc
from trainer_bridge.ways import carriers, sender

GPU = "GPU-00000000-0000-0000-0000-000000000000"
_IDS = struct.Struct("=QQQ40x")
_numbers = count(1)


class Memories:
    """The allocations of this process."""

    def __init__(self) -> None:
        self.made: dict[int, HostMemory] = {}
        self._numbers: dict[int, int] = {}
        self.torn: list[Handle] = []
        """What was freed while an engine of this process had it open."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        memory = HostMemory(nbytes)
        base = memory.content.data_ptr()
        self.made[base], self._numbers[base] = memory, next(_numbers)
        return memory.content

    def free(self, base: int) -> None:
        handle = self.export(base)
        self.torn += [handle for each in MappedFile.opened if each.handle == handle]
        del self.made[base]

    def base_of(self, address: int) -> tuple[int, int]:
        for base, memory in self.made.items():
            if base <= address < base + memory.content.numel():
                return base, memory.content.numel()
        return address, 1  # not exportable

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_contiguous() and self.base_of(tensor.data_ptr())[0] in self.made

    def export(self, base: int) -> Handle:
        memory = self.made[base]
        ipc = _IDS.pack(os.getpid(), memory.fd, self._numbers[base]).hex()
        return Handle(ipc, memory.content.numel(), GPU)

    def still_there(self, bases: Iterable[int], handles: Iterable[Handle], device: int) -> bool:
        return all(
            base in self.made and self.export(base) == handle
            for base, handle in zip(bases, handles, strict=True)
        )


class MappedFile:
    """``cuda_memory.Mapping`` of such a handle."""

    opened: list["MappedFile"] = []  # noqa: RUF012  (of this process)

    def __init__(self, handle: Handle, device: int) -> None:
        pid, fd, _ = _IDS.unpack(bytes.fromhex(handle.ipc))
        with Path(f"/proc/{pid}/fd/{fd}").open("r+b") as file:
            content = torch.frombuffer(mmap.mmap(file.fileno(), handle.nbytes), dtype=torch.uint8)
        self.tensor = content.as_subclass(OnDevice)
        self.handle, self.nbytes, self.address = handle, handle.nbytes, content.data_ptr()
        self.opened.append(self)

    def close(self) -> None:
        self.opened.remove(self)


def install(patch: pytest.MonkeyPatch) -> tuple[Memories, Interpreter]:
    """Have trainer and engine of this process take such memory for their GPUs'."""
    memories = Memories()

    class FileMemory:
        """``cuda_memory.DeviceMemory``."""

        def __init__(self, nbytes: int, device: int) -> None:
            self.tensor = memories.allocate(nbytes)

        def handle(self) -> Handle:
            return memories.export(self.tensor.data_ptr())

        def close(self) -> None:
            memories.free(self.tensor.data_ptr())

    class Reading(Interpreter):
        """May read what is mapped at the moment."""

        @property
        def readable(self) -> list[tuple[int, int]]:
            mapped = [span_of(mapping.tensor) for mapping in MappedFile.opened]
            return [*mapped, *super().readable]

    interpreter = Reading()
    for name in ("base_of", "export", "still_there"):
        patch.setattr(cuda_ipc, name, getattr(memories, name))
    patch.setattr(cuda_ipc, "exportable", lambda base: base in memories.made)
    patch.setattr(placed_shards, "can_be_mapped", memories.holds)
    patch.setattr(sender, "can_be_mapped", lambda tensor: False)
    patch.setattr(shard_codes, "DeviceMemory", FileMemory)
    patch.setattr(carriers, "DeviceMemory", FileMemory)
    patch.setattr(transaction, "gpu_of", lambda named, layout: torch.device("cpu"))
    patch.setattr(torch.cuda, "synchronize", lambda device: None)
    patch.setattr(torch.cuda, "current_stream", lambda device: FakeEvent(enable_timing=True))
    without_triton(patch)
    patch.setattr(shared_memory, "Mapping", MappedFile)
    patch.setattr(triton_writer, "compile_descriptors", interpreter.compile_descriptors)
    patch.setattr(triton_writer, "DeviceMemory", FakeDeviceMemory)
    patch.setattr(triton_writer, "gpu_uuid", lambda device: GPU)
    patch.setattr(triton_writer, "joined_memory", interpreter.joined_memory)
    patch.setattr(torch.cuda, "Event", FakeEvent)
    patch.setattr(engine_weights, "writer_on", lambda device: TritonWriter)
    return memories, interpreter


def refuse_others(patch: pytest.MonkeyPatch) -> None:
    """From now on no memory of another process can be mapped."""
    init = MappedFile.__init__

    def own(self: MappedFile, handle: Handle, device: int) -> None:
        if _IDS.unpack(bytes.fromhex(handle.ipc))[0] != os.getpid():
            raise CudaMemoryError("no peer access between these GPUs")
        init(self, handle, device)

    patch.setattr(MappedFile, "__init__", own)
