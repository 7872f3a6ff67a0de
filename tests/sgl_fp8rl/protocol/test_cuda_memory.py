"""Handles as they travel, and every way the driver can refuse; the memory itself is tests/gpu's."""

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_fp8rl.protocol import cuda_driver, cuda_memory
from sgl_fp8rl.protocol.cuda_memory import (
    CudaMemoryError,
    DeviceMemory,
    Handle,
    Mapping,
    base_of,
    export,
    exportable,
    gpu_uuid,
)

UUID = bytes(range(0xA0, 0xB0))
GPU = "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf"
IPC = bytes(range(64))
BASE, SIZE = 0x7F00_0000_0000, 4 << 20
ERRORS = {2: b"CUDA_ERROR_OUT_OF_MEMORY", 201: b"CUDA_ERROR_INVALID_CONTEXT"}

handles = st.builds(
    Handle,
    ipc=st.binary(min_size=64, max_size=64).map(bytes.hex),
    nbytes=st.integers(1, (1 << 63) - 1),
    gpu=st.uuids().map(lambda uuid: f"GPU-{uuid}"),
)


class FakeDriver:
    """Functions of libcuda with fixed answers: one allocation, on GPU 0. ``refuse`` sets errors."""

    def __init__(self) -> None:
        self.refuse: dict[str, int] = {}
        self.calls: list[str] = []
        self.depth = 0  # contexts pushed in this thread
        self.attributes = (2, 0, 0, 1)  # device memory, not managed, GPU 0, exportable
        self.opened = b""
        for name in cuda_driver.SIGNATURES:
            setattr(self, name, self._function(name))

    def _function(self, name: str) -> Callable[..., int]:
        # A plain function: it takes argtypes and restype as a ctypes function does.
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.refuse:
                return self.refuse[name]
            answer = getattr(self, "_" + name, None)
            return answer(*arguments) or 0 if answer else 0

        return call

    def _cuGetErrorName(self, status: int, name: Any) -> int:
        if status not in ERRORS:
            return 1
        name._obj.value = ERRORS[status]
        return 0

    def _cuDeviceGet(self, ordinal: Any, device: int) -> None:
        ordinal._obj.value = device

    def _cuDeviceGetUuid_v2(self, uuid: Any, ordinal: int) -> None:
        uuid[:] = UUID

    def _cuDevicePrimaryCtxRetain(self, context: Any, ordinal: int) -> None:
        context._obj.value = 0xC0

    def _cuCtxPushCurrent_v2(self, context: int) -> None:
        assert context == 0xC0
        self.depth += 1

    def _cuCtxPopCurrent_v2(self, context: Any) -> None:
        self.depth -= 1

    def _cuMemAlloc_v2(self, address: Any, nbytes: int) -> None:
        assert self.depth
        address._obj.value = BASE

    def _cuMemGetAddressRange_v2(self, base: Any, size: Any, address: int) -> None:
        base._obj.value, size._obj.value = BASE, SIZE

    def _cuPointerGetAttributes(self, count: int, which: Any, fields: Any, address: int) -> None:
        assert list(which) == [2, 8, 9, 10]
        for field, value in zip(fields, self.attributes, strict=True):
            ctypes.c_int.from_address(field).value = value

    def _cuIpcGetMemHandle(self, handle: Any, base: int) -> None:
        assert self.depth
        handle._obj.reserved[:] = IPC

    def _cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: int) -> None:
        assert self.depth and flags == 1
        self.opened = bytes(handle)
        address._obj.value = BASE


def forget() -> None:
    """The driver, and what it said."""
    of_driver = cuda_driver.driver, cuda_driver.library, cuda_driver.primary_context
    for cache in (*of_driver, cuda_memory.gpu_uuid):
        cache.cache_clear()


@pytest.fixture
def fresh() -> Iterator[None]:
    forget()
    yield
    forget()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, fresh: None) -> FakeDriver:
    fake = FakeDriver()

    def load(name: str) -> FakeDriver:
        assert name == "libcuda.so.1"
        return fake

    monkeypatch.setattr(ctypes, "CDLL", load)
    return fake


@given(handles)
def test_a_handle_survives_json(handle: Handle) -> None:
    assert Handle.from_json(json.loads(json.dumps(handle.to_json()))) == handle


GOOD = Handle(IPC.hex(), SIZE, GPU).to_json()
MALFORMED: dict[str, list[Any]] = {
    "ipc": [
        None,
        *("0" * 126, "0" * 130, "g" * 128, "A" * 128),
        *("0" * 126 + " 0", "0" * 128 + "\n", "\u0660" * 128),
    ],
    "nbytes": [0, -1, 1 << 63, True, 1.0, "1"],
    "gpu": [
        None,
        *(GPU.removeprefix("GPU-"), f"GPU-{GPU.removeprefix('GPU-').replace('-', '')}"),
        *(f"{GPU}\n", f"{GPU}0", GPU.upper()),
    ],
}


@pytest.mark.parametrize("data", [None, [], "ipc", 1, {}])
def test_what_is_no_handle_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="fields ipc, nbytes and gpu"):
        Handle.from_json(data)


@pytest.mark.parametrize("field", MALFORMED)
def test_a_handle_is_these_fields_each_well_formed(field: str) -> None:
    for value in MALFORMED[field]:
        with pytest.raises(ValueError, match=f"handle's {field} "):
            Handle.from_json(GOOD | {field: value})
    for data in (GOOD | {"flags": 1}, {name: GOOD[name] for name in GOOD.keys() - {field}}):
        with pytest.raises(ValueError, match="fields"):
            Handle.from_json(data)


def test_a_view_is_of_the_gpu_that_holds_the_memory(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank on another GPU maps it too; torch copies what is said to lie elsewhere."""
    driver.attributes = (2, 0, 3, 1)

    def as_tensor(holder: Any, device: torch.device) -> Any:
        address, _ = holder.__cuda_array_interface__["data"]
        is_view = device == torch.device("cuda", 3)
        return SimpleNamespace(data_ptr=lambda: address if is_view else address + 1)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    assert Mapping(handle(), 0).tensor.data_ptr() == BASE
    driver.attributes = (2, 0, 2, 1)
    with pytest.raises(CudaMemoryError, match=r"copied the memory .* of cuda:2"):
        _ = Mapping(handle(), 0).tensor


def test_nothing_is_loaded_at_import() -> None:
    program = (
        "import ctypes, torch\n"
        "def refuse(*arguments, **options): raise AssertionError(arguments)\n"
        "ctypes.CDLL.__init__ = refuse\n"
        "import sgl_fp8rl.protocol.cuda_memory\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert child.returncode == 0, child.stderr


def handle(nbytes: int = SIZE) -> Handle:
    return Handle(IPC.hex(), nbytes, GPU)


USES: dict[str, Callable[[], Any]] = {
    "DeviceMemory": lambda: DeviceMemory(1, 0),
    "Mapping": lambda: Mapping(handle(), 0),
    "base_of": lambda: base_of(BASE),
    "exportable": lambda: exportable(BASE),
    "export": lambda: export(BASE),
    "gpu_uuid": lambda: gpu_uuid(0),
}


@pytest.mark.parametrize("use", USES)
def test_without_a_driver_each_use_says_so(
    use: str, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(CudaMemoryError, match=r"libcuda\.so\.1"):
        USES[use]()


def test_a_driver_too_old_is_named_as_such(driver: FakeDriver) -> None:
    del driver.cuDeviceGetUuid_v2  # type: ignore[attr-defined]
    with pytest.raises(CudaMemoryError, match="cuDeviceGetUuid_v2"):
        gpu_uuid(0)


REFUSALS = [
    ("cuInit", "gpu_uuid", "driver did not start"),
    ("cuDeviceGet", "gpu_uuid", "no GPU 0"),
    ("cuDeviceGetUuid_v2", "gpu_uuid", "UUID"),
    ("cuDevicePrimaryCtxRetain", "DeviceMemory", "context"),
    ("cuCtxPushCurrent_v2", "DeviceMemory", "current"),
    ("cuCtxPopCurrent_v2", "DeviceMemory", "current"),
    ("cuMemAlloc_v2", "DeviceMemory", "1 bytes .* GPU 0"),
    ("cuMemGetAddressRange_v2", "base_of", f"{BASE:#x}"),
    ("cuMemGetAddressRange_v2", "Mapping", f"{BASE:#x}"),
    ("cuPointerGetAttributes", "exportable", f"{BASE:#x}"),
    ("cuIpcGetMemHandle", "export", f"{BASE:#x} of GPU 0"),
    ("cuIpcOpenMemHandle_v2", "Mapping", f"{SIZE} bytes of {GPU} .* GPU 0"),
]
"""What the driver refuses, in which use, and what the error must name."""


@pytest.mark.parametrize(("function", "use", "fact"), REFUSALS)
def test_each_refusal_names_what_failed_and_the_drivers_name_for_it(
    driver: FakeDriver, function: str, use: str, fact: str
) -> None:
    USES[use]()  # nothing is refused yet
    forget()
    driver.refuse[function] = 2
    with pytest.raises(CudaMemoryError, match=f"{fact}.*CUDA_ERROR_OUT_OF_MEMORY"):
        USES[use]()
    if function != "cuCtxPopCurrent_v2":
        assert driver.depth == 0


def test_an_error_that_the_driver_cannot_name_has_its_number(driver: FakeDriver) -> None:
    driver.refuse["cuMemAlloc_v2"] = 777
    with pytest.raises(CudaMemoryError, match="CUDA error 777"):
        DeviceMemory(1, 0)


@pytest.mark.parametrize("function", ["cuCtxSynchronize", "cuMemFree_v2", "cuIpcCloseMemHandle"])
def test_a_failed_close_is_told_once(driver: FakeDriver, function: str) -> None:
    opened: list[DeviceMemory | Mapping] = [DeviceMemory(1, 0), Mapping(handle(), 0)]
    driver.refuse[function] = 2
    failed = 0
    for memory in opened:
        try:
            memory.close()
        except CudaMemoryError as error:
            assert "CUDA_ERROR_OUT_OF_MEMORY" in str(error)
            failed += 1
        memory.close()
    assert failed == (2 if function == "cuCtxSynchronize" else 1)
    assert driver.depth == 0


def test_memory_is_freed_once_and_after_the_device_is_done(driver: FakeDriver) -> None:
    memory = DeviceMemory(1, 0)
    assert (memory.address, memory.nbytes) == (BASE, 1)
    memory.close()
    memory.close()
    ended = [call for call in driver.calls if call in ("cuCtxSynchronize", "cuMemFree_v2")]
    assert ended == ["cuCtxSynchronize", "cuMemFree_v2"]
    with pytest.raises(CudaMemoryError, match="is closed"):
        _ = memory.tensor


def test_a_mapping_is_closed_not_freed(driver: FakeDriver) -> None:
    mapping = Mapping(handle(), 0)
    assert (mapping.address, mapping.nbytes) == (BASE, SIZE)
    assert driver.opened == IPC
    mapping.close()
    mapping.close()
    assert driver.calls.count("cuIpcCloseMemHandle") == 1
    assert "cuMemFree_v2" not in driver.calls


def test_a_handle_that_claims_more_than_there_is_leaves_no_mapping(driver: FakeDriver) -> None:
    Mapping(handle(SIZE), 0).close()
    with pytest.raises(CudaMemoryError, match=f"claims {SIZE + 1} bytes .* has {SIZE}"):
        Mapping(handle(SIZE + 1), 0)
    assert driver.calls.count("cuIpcOpenMemHandle_v2") == 2
    assert driver.calls.count("cuIpcCloseMemHandle") == 2
    driver.refuse["cuMemGetAddressRange_v2"] = 2
    with pytest.raises(CudaMemoryError, match="no allocation holds"):
        Mapping(handle(SIZE), 0)
    assert driver.calls.count("cuIpcCloseMemHandle") == 3


def test_memory_of_a_gpu_that_is_not_visible_leaves_no_mapping(driver: FakeDriver) -> None:
    """The driver may map it; torch cannot view it."""
    driver.attributes = (2, 0, -1, 1)

    def sees_gpu_0(ordinal: Any, device: int) -> int:
        ordinal._obj.value = 0
        return 0 if device == 0 else 101  # CUDA_ERROR_INVALID_DEVICE

    driver._cuDeviceGet = sees_gpu_0  # type: ignore[assignment,method-assign]
    with pytest.raises(CudaMemoryError, match=r"sees no GPU .*CUDA_VISIBLE_DEVICES"):
        Mapping(handle(), 0)
    assert driver.calls.count("cuIpcCloseMemHandle") == 1


def test_export_names_the_allocation(driver: FakeDriver) -> None:
    assert export(BASE) == handle(SIZE)
    assert DeviceMemory(5, 0).handle() == handle(5)
    with pytest.raises(CudaMemoryError, match=f"lies 64 bytes into .* export {BASE:#x}"):
        export(BASE + 64)


@pytest.mark.parametrize(
    "attributes",
    [(2, 0, 0, 0), (2, 1, 0, 1), (1, 0, 0, 1), (0, 0, 0, 0)],
    ids=["mapped by hand", "managed", "host", "unknown"],
)
def test_memory_that_is_not_plain_is_not_exported(
    driver: FakeDriver, attributes: tuple[int, int, int, int]
) -> None:
    assert exportable(BASE)
    driver.attributes = attributes
    assert not exportable(BASE)
    with pytest.raises(CudaMemoryError, match="not plain device memory"):
        export(BASE)
    assert "cuIpcGetMemHandle" not in driver.calls


def test_a_thread_without_a_context_borrows_one(driver: FakeDriver) -> None:
    found = driver._cuMemGetAddressRange_v2

    def needs_context(base: Any, size: Any, address: int) -> int:
        if not driver.depth:
            return 201
        found(base, size, address)
        return 0

    driver._cuMemGetAddressRange_v2 = needs_context  # type: ignore[assignment,method-assign]
    assert base_of(BASE + 5) == (BASE, SIZE)
    assert driver.depth == 0
