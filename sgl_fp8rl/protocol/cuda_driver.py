"""The CUDA driver's library through ctypes: the few calls that torch does not offer.

Nothing is loaded at import; ``libcuda`` is opened at the first use. Not cuda-python: its 13.4.4
gives no access to the bytes of a ``CUipcMemHandle``, and a trainer's environment need not have it.
"""

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

HANDLE_BYTES = 64  # CU_IPC_HANDLESIZE
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


class CudaMemoryError(RuntimeError):
    """Device memory cannot be allocated, exported or mapped."""


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


# Argument types as in cuda.h; each function returns a CUresult, 0 where all is well.
ADDRESS, INT, SIZE, CONTEXT = ctypes.c_uint64, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (INT, ctypes.POINTER(ctypes.c_char_p)),
    "cuDeviceGet": (ctypes.POINTER(INT), INT),
    "cuDeviceGetUuid_v2": (ctypes.c_ubyte * 16, INT),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(CONTEXT), INT),
    "cuCtxPushCurrent_v2": (CONTEXT,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(CONTEXT),),
    "cuCtxSynchronize": (),
    "cuMemAlloc_v2": (ctypes.POINTER(ADDRESS), SIZE),
    "cuMemFree_v2": (ADDRESS,),
    "cuMemGetAddressRange_v2": (ctypes.POINTER(ADDRESS), ctypes.POINTER(SIZE), ADDRESS),
    "cuPointerGetAttributes": (
        ctypes.c_uint,
        ctypes.POINTER(INT),
        ctypes.POINTER(ctypes.c_void_p),
        ADDRESS,
    ),
    "cuIpcGetMemHandle": (ctypes.POINTER(IpcHandle), ADDRESS),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(ADDRESS), IpcHandle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (ADDRESS,),
}


@contextmanager
def current(device: int) -> Iterator[ctypes.CDLL]:
    """Make a device's primary context, which is torch's, current in this thread for a while."""
    cuda = driver()
    what, advice = f"GPU {device} could not be made current", "restart the process"
    check(cuda.cuCtxPushCurrent_v2(primary_context(device)), what, advice)
    try:
        yield cuda
    finally:
        check(cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())), what, advice)


@functools.cache
def primary_context(device: int) -> int | None:
    """A device's context, retained until the process ends, as torch retains it."""
    context = ctypes.c_void_p()
    status = driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal(device))
    check(status, f"GPU {device} has no context", "free memory on it, or check nvidia-smi")
    return context.value


def ordinal(device: int) -> int:
    """The driver's CUdevice of torch's device index."""
    found = ctypes.c_int()
    status = driver().cuDeviceGet(ctypes.byref(found), device)
    check(status, f"this process sees no GPU {device}", "check CUDA_VISIBLE_DEVICES")
    return found.value


def check(status: int, what: str, advice: str) -> None:
    """Raise CudaMemoryError if a call failed."""
    if status:
        name = ctypes.c_char_p()
        library().cuGetErrorName(status, ctypes.byref(name))  # leaves NULL for what it knows not
        text = name.value.decode() if name.value else f"CUDA error {status}"
        raise CudaMemoryError(f"{what} ({text}); {advice}")


@functools.cache
def driver() -> ctypes.CDLL:
    """The library, initialised."""
    cuda = library()
    what, advice = "the NVIDIA driver did not start", "check nvidia-smi, and spawn, do not fork"
    check(cuda.cuInit(0), what, f"{advice}, processes that use CUDA")
    return cuda


@functools.cache
def library() -> ctypes.CDLL:
    """The library with its signatures."""
    try:
        found = ctypes.CDLL("libcuda.so.1")
        for name, arguments in SIGNATURES.items():
            function = getattr(found, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
    except (OSError, AttributeError) as error:
        raise CudaMemoryError(
            f"the NVIDIA driver's library cannot be used ({error}); install a driver that fits "
            "torch, or keep trainer and engine on the CPU"
        ) from error
    return found
