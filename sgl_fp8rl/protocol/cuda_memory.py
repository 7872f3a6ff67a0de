"""Device memory that two processes of one host share, through the CUDA driver's own IPC handles.

Not torch's ``_share_cuda_``: its reference counter keeps the exporter's freed blocks in limbo until
the importer lets go of them; a plain handle does not. The price is that whoever exports must keep
the memory until every mapping of it is closed.

A handle names an allocation, not an address: cuIpcGetMemHandle "will return a unique handle for the
new memory" where a freed address is given out again (CUDA driver API, unified IPC), so equal
handles mean the same memory.
"""

import ctypes
import functools
import re
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch

from sgl_fp8rl.protocol.cuda_driver import (
    ADDRESS,
    HANDLE_BYTES,
    INVALID_CONTEXT,
    IpcHandle,
    check,
    current,
    driver,
    ordinal,
)
from sgl_fp8rl.protocol.cuda_driver import CudaMemoryError as CudaMemoryError

# The driver carves smaller allocations out of blocks of this size and a handle shares the whole
# block, so memory that is made to be shared comes in whole blocks (CUDA programming guide, IPC).
BLOCK_BYTES = 2 << 20
_LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE
# CU_POINTER_ATTRIBUTE_: MEMORY_TYPE, IS_MANAGED, DEVICE_ORDINAL, IS_LEGACY_CUDA_IPC_CAPABLE
_ATTRIBUTES = (ctypes.c_int * 4)(2, 8, 9, 10)
_HEX = re.compile(f"[0-9a-f]{{{2 * HANDLE_BYTES}}}")
_GPU = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class Handle:
    """Names one allocation to another process.

    ``ipc`` is the CUipcMemHandle in hex, ``nbytes`` how much of the allocation may be used from its
    start, ``gpu`` the UUID of the GPU that holds it.
    """

    ipc: str
    nbytes: int
    gpu: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> "Handle":
        """The handle in a message of another process.

        Raises:
            ValueError: a field is missing, unknown, or no such thing.
        """
        if not isinstance(data, dict) or set(data) != {"ipc", "nbytes", "gpu"}:
            raise ValueError("a memory handle must have the fields ipc, nbytes and gpu alone")
        ipc, nbytes, gpu = data["ipc"], data["nbytes"], data["gpu"]
        if not isinstance(ipc, str) or not _HEX.fullmatch(ipc):
            raise ValueError(f"a memory handle's ipc must be {HANDLE_BYTES} bytes in hex")
        if type(nbytes) is not int or not 0 < nbytes < 1 << 63:
            raise ValueError("a memory handle's nbytes must be a positive 64-bit integer")
        if not isinstance(gpu, str) or not _GPU.fullmatch(gpu):
            raise ValueError('a memory handle\'s gpu must be a UUID such as "GPU-xxxxxxxx-..."')
        return cls(ipc, nbytes, gpu)


class _Memory:
    """Device memory that this process can reach at ``address`` until it is closed."""

    def __init__(self, address: int, nbytes: int, device: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self._device = device

    @property
    def tensor(self) -> torch.Tensor:
        """The memory as uint8 [nbytes]: a view that keeps nothing alive and frees nothing."""
        if not self.address:
            raise CudaMemoryError("this device memory is closed; allocate or map it again")
        interface = {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False)}
        holder = SimpleNamespace(__cuda_array_interface__={**interface, "version": 3})
        # the GPU that holds it need not be the one that maps it: elsewhere torch would copy
        holds = torch.device("cuda", _attributes(self.address)[2])
        view = torch.as_tensor(holder, device=holds)
        if view.data_ptr() != self.address:
            raise CudaMemoryError(
                f"torch copied the memory at {self.address:#x} of {holds} instead of viewing it; "
                "report this"
            )
        return view

    def close(self) -> None:
        """Let go of the memory once the device is done with it; a second call does nothing.

        Raises:
            CudaMemoryError: work on the device failed, and its context with it.
        """
        if not self.address:
            return
        address, self.address = self.address, 0
        what = f"the memory at {address:#x} of GPU {self._device} could not be let go"
        advice = "an earlier kernel of this process failed, so restart the process"
        with current(self._device) as cuda:
            check(cuda.cuCtxSynchronize(), what, advice)
            check(self._release(cuda, address), what, advice)

    def _release(self, cuda: ctypes.CDLL, address: int) -> int:
        raise NotImplementedError


class DeviceMemory(_Memory):
    """``nbytes`` of plain device memory, from the driver and not from torch's allocator.

    Raises:
        CudaMemoryError: the device has too little memory left, or does not exist.
    """

    def __init__(self, nbytes: int, device: int) -> None:
        address = ADDRESS()
        size = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
        with current(device) as cuda:
            check(
                cuda.cuMemAlloc_v2(ctypes.byref(address), size),
                f"{nbytes} bytes could not be allocated on GPU {device}",
                "make the bucket smaller, or free memory (torch.cuda.empty_cache() returns what "
                "torch holds unused)",
            )
        super().__init__(address.value, nbytes, device)

    def handle(self) -> Handle:
        """What another process needs to map this memory."""
        return _handle(self.address, self.nbytes, self._device)

    def _release(self, cuda: ctypes.CDLL, address: int) -> int:
        return int(cuda.cuMemFree_v2(address))


class Mapping(_Memory):
    """Another process's allocation, mapped into this one.

    The driver counts: the same allocation opened twice has one address and is unmapped by the
    second close. The exporter must not free the memory before.

    Raises:
        CudaMemoryError: the exporter is gone or is this process, the GPUs cannot reach each other,
            this process does not see the exporter's, or the handle claims more bytes than there
            are.
    """

    def __init__(self, handle: Handle, device: int) -> None:
        address = ADDRESS()
        ipc = IpcHandle.from_buffer_copy(bytes.fromhex(handle.ipc))
        with current(device) as cuda:
            check(
                cuda.cuIpcOpenMemHandle_v2(ctypes.byref(address), ipc, _LAZY_ENABLE_PEER_ACCESS),
                f"{handle.nbytes} bytes of {handle.gpu} could not be mapped on GPU {device}",
                "the process that exported them must be another one, on this host, still alive, "
                "and not have freed them",
            )
        super().__init__(address.value, handle.nbytes, device)
        try:
            base, size = base_of(self.address)
            if self.address + handle.nbytes > base + size:
                raise CudaMemoryError(
                    f"a memory handle claims {handle.nbytes} bytes of {handle.gpu} and its "
                    f"allocation has {base + size - self.address}; export the memory again"
                )
            ordinal(_attributes(self.address)[2])  # torch can view it: CUDA_VISIBLE_DEVICES has it
        except BaseException:
            self.close()
            raise

    def _release(self, cuda: ctypes.CDLL, address: int) -> int:
        return int(cuda.cuIpcCloseMemHandle(address))


def base_of(address: int) -> tuple[int, int]:
    """The (base address, bytes) of the allocation that holds a device address.

    Raises:
        CudaMemoryError: no allocation of this process holds it.
    """
    base, size = ADDRESS(), ctypes.c_size_t()
    arguments = ctypes.byref(base), ctypes.byref(size), address
    status = driver().cuMemGetAddressRange_v2(*arguments)
    if status == INVALID_CONTEXT:  # a thread that never used CUDA has no context to ask in
        with current(_attributes(address)[2]) as cuda:
            status = cuda.cuMemGetAddressRange_v2(*arguments)
    check(status, f"no allocation holds {address:#x}", "give the address of a live CUDA tensor")
    return base.value, size.value


def exportable(address: int) -> bool:
    """Whether an address lies in memory that ``export`` can name to another process.

    False for memory that was mapped by hand, as expandable segments and torch_memory_saver do, for
    memory pools (cudaMallocAsync), and for managed and host memory.
    """
    kind, managed, _, capable = _attributes(address)
    return kind == _DEVICE_MEMORY and capable != 0 and managed == 0


def export(base: int) -> Handle:
    """The handle of the allocation that begins at ``base`` (see ``base_of``).

    Raises:
        CudaMemoryError: the memory cannot be exported, or no allocation begins there.
    """
    if not exportable(base):
        raise CudaMemoryError(
            f"the memory at {base:#x} is not plain device memory and cannot be shared with another "
            "process; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False in this process and "
            "allocate outside of torch_memory_saver's regions"
        )
    start, nbytes = base_of(base)
    if start != base:
        raise CudaMemoryError(
            f"{base:#x} lies {base - start} bytes into its allocation; export {start:#x}"
        )
    return _handle(base, nbytes, _attributes(base)[2])


def still_there(bases: Iterable[int], handles: Iterable[Handle], device: int) -> bool:
    """Whether these handles still name the allocations that begin at ``bases``.

    Far cheaper than exporting them again: one driver call for each.
    """
    ipc = IpcHandle()
    out = ctypes.byref(ipc)
    with current(device) as cuda:
        return all(
            cuda.cuIpcGetMemHandle(out, base) == 0 and bytes(ipc).hex() == handle.ipc
            for base, handle in zip(bases, handles, strict=True)
        )


@functools.cache
def gpu_uuid(device: int) -> str:
    """The UUID of torch's device ``device``, as nvidia-smi writes it: "GPU-xxxxxxxx-...".

    CUDA_VISIBLE_DEVICES is applied by the driver, so torch's indices are the driver's ordinals.
    """
    raw = (ctypes.c_ubyte * 16)()
    status = driver().cuDeviceGetUuid_v2(raw, ordinal(device))
    check(status, f"GPU {device} did not report its UUID", "check nvidia-smi")
    return f"GPU-{uuid.UUID(bytes=bytes(raw))}"


def visible_gpus() -> set[str]:
    """The UUIDs of the GPUs whose memory this process can map."""
    return {gpu_uuid(device) for device in range(torch.cuda.device_count())}


def _handle(base: int, nbytes: int, device: int) -> Handle:
    ipc = IpcHandle()
    with current(device) as cuda:
        check(
            cuda.cuIpcGetMemHandle(ctypes.byref(ipc), base),
            f"the memory at {base:#x} of GPU {device} could not be exported",
            "check that it is still allocated and that this system has CUDA IPC",
        )
    return Handle(bytes(ipc).hex(), nbytes, gpu_uuid(device))


def _attributes(address: int) -> list[int]:
    """Memory type, managed, device ordinal, legacy IPC; zeros for memory CUDA does not know."""
    # The driver writes 1 to 8 bytes each, at the low end: wide, zeroed fields hold any of them.
    values = (ctypes.c_uint64 * 4)()
    start = ctypes.addressof(values)
    fields = (ctypes.c_void_p * 4)(*(start + 8 * i for i in range(4)))
    status = driver().cuPointerGetAttributes(4, _ATTRIBUTES, fields, address)
    check(status, f"CUDA cannot say what lies at {address:#x}", "give a CUDA tensor's address")
    return list(values)
