"""Memory that two real processes share on one GPU: what each sees, and when it is given back."""

import ctypes
import json
import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_fp8rl.protocol import cuda_driver
from sgl_fp8rl.protocol.cuda_memory import (
    CudaMemoryError,
    DeviceMemory,
    Handle,
    Mapping,
    base_of,
    export,
    exportable,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ANSWER_S = 120  # a process's first answer waits for torch's import and a CUDA context
MIB = 1 << 20
FREE_TOLERANCE = 2 * MIB


class Peer:
    """Another process that runs functions of this module, by name."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def call(self, function: str, *arguments: Any) -> Any:
        self._connection.send((function, arguments))
        assert self._connection.poll(ANSWER_S), f"{function} did not answer"
        answer, error = self._connection.recv()
        assert error is None, error
        return answer

    def end(self) -> None:
        self._connection.close()
        self.process.join(30)
        self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(30)
        assert self.process.exitcode is not None


def serve(connection: Connection) -> None:
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((globals()[function](*arguments), None))
        except RuntimeError as error:
            connection.send((None, f"{type(error).__name__}: {error}"))


@contextmanager
def new_peer() -> Iterator[Peer]:
    peer = Peer()
    try:
        yield peer
    finally:
        peer.end()


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with new_peer() as started:
        started.call("start")
        yield started


# What the other process runs. A handle arrives as the JSON text that a socket would carry.

held: list[Any] = []


def start() -> None:
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()


def opened(text: str) -> Mapping:
    return Mapping(Handle.from_json(json.loads(text)), 0)


def read_and_invert(text: str, offset: int, nbytes: int) -> bytes:
    mapping = opened(text)
    part = mapping.tensor[offset : offset + nbytes]
    seen = bytes(part.tolist())
    part.bitwise_not_()
    mapping.close()  # which waits for the write
    return seen


def open_twice(text: str) -> tuple[bool, int, int]:
    first, second = opened(text), opened(text)
    same = first.address == second.address
    before = int(first.tensor[0])
    first.close()
    after = int(second.tensor[0])
    second.close()
    return same, before, after


def hold(text: str) -> None:
    held.append(opened(text))


def let_go() -> None:
    while held:
        held.pop().close()


def refusal(text: str) -> str | None:
    try:
        opened(text).close()
    except CudaMemoryError as error:
        return str(error)
    return None


def allocate_and_export(nbytes: int) -> str:
    memory = DeviceMemory(nbytes, 0)
    held.append(memory)
    return json.dumps(memory.handle().to_json())


def try_to_export(tensor: torch.Tensor) -> tuple[bool, str | None]:
    address = tensor.data_ptr()
    try:
        export(base_of(address)[0] if exportable(address) else address)
    except CudaMemoryError as error:
        return exportable(address), str(error)
    return exportable(address), None


def export_a_tensor() -> tuple[bool, str | None]:
    return try_to_export(torch.ones(64 * MIB, dtype=torch.uint8, device="cuda"))


def export_in_and_out_of_a_region() -> list[tuple[bool, str | None]]:
    from torch_memory_saver import torch_memory_saver  # type: ignore[import-untyped]

    with torch_memory_saver.region():
        inside = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    outside = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    return [try_to_export(inside), try_to_export(outside)]


# The tests.


def text_of(handle: Handle) -> str:
    return json.dumps(handle.to_json())


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def pattern(nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(nbytes)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)


def test_both_processes_see_the_same_bytes(peer: Peer) -> None:
    nbytes = 3 * MIB + 5  # no whole number of blocks
    memory = DeviceMemory(nbytes, 0)
    assert memory.tensor.shape == (nbytes,)
    assert memory.tensor.dtype == torch.uint8
    assert memory.tensor.data_ptr() == memory.address
    before = pattern(nbytes)
    memory.tensor.copy_(before)
    torch.cuda.synchronize()
    assert peer.call("read_and_invert", text_of(memory.handle()), 0, nbytes) == bytes(
        before.tolist()
    )
    assert torch.equal(memory.tensor.cpu(), ~before)
    memory.close()
    memory.close()


@pytest.mark.parametrize("nbytes", [1000, 30 * MIB], ids=["small pool", "large pool"])
def test_a_tensor_of_torchs_allocator_is_read_in_place(peer: Peer, nbytes: int) -> None:
    neighbours = [torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(3)]
    tensor = neighbours[1]
    before = pattern(nbytes)
    tensor.copy_(before)
    torch.cuda.synchronize()
    assert exportable(tensor.data_ptr())
    base, size = base_of(tensor.data_ptr())
    offset = tensor.data_ptr() - base
    assert 0 <= offset <= offset + nbytes <= size
    read = min(nbytes, MIB)
    seen = peer.call("read_and_invert", text_of(export(base)), offset, read)
    assert seen == bytes(before[:read].tolist())
    assert torch.equal(tensor[:read].cpu(), ~before[:read])
    assert torch.equal(tensor[read:].cpu(), before[read:])
    assert not neighbours[0].any() and not neighbours[2].any()


def test_only_a_base_is_exported() -> None:
    memory = DeviceMemory(4 * MIB, 0)
    assert base_of(memory.address + MIB) == (memory.address, 4 * MIB)
    assert export(memory.address) == memory.handle()
    with pytest.raises(CudaMemoryError, match=f"export {memory.address:#x}"):
        export(memory.address + MIB)
    memory.close()


@pytest.fixture
def plain_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("plain_allocator")
@pytest.mark.parametrize("setting", ["", "expandable_segments:True", "backend:cudaMallocAsync"])
def test_which_allocators_memory_can_be_exported(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    with new_peer() as other:
        can, sentence = other.call("export_a_tensor")
    assert can == (not setting) == (sentence is None)
    assert can or "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False" in sentence


@pytest.mark.usefixtures("plain_allocator")
def test_memory_savers_memory_is_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch_memory_saver")
    from torch_memory_saver.hooks.mode_preload import configure_subprocess  # type: ignore

    # Its library is loaded before torch and must find the runtime that torch brings.
    torch.cuda.init()
    maps = Path("/proc/self/maps").read_text().splitlines()
    runtime = next(Path(line.split()[-1]) for line in maps if "/libcudart.so" in line)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(runtime.parent), prepend=":")
    with configure_subprocess(), new_peer() as other:
        inside, outside = other.call("export_in_and_out_of_a_region")
    assert inside[0] is False
    assert inside[1] is not None and "torch_memory_saver" in inside[1]
    assert outside == (True, None)


def test_host_and_managed_memory_are_not_exported() -> None:
    assert not exportable(torch.zeros(MIB).data_ptr())
    assert not exportable(torch.zeros(MIB).pin_memory().data_ptr())
    address = ctypes.c_uint64()
    with cuda_driver.current(0) as driver:
        assert driver.cuMemAllocManaged(ctypes.byref(address), ctypes.c_size_t(2 * MIB), 1) == 0
    try:
        assert not exportable(address.value)
        with pytest.raises(CudaMemoryError, match="not plain device memory"):
            export(address.value)
    finally:
        with cuda_driver.current(0) as driver:
            assert driver.cuMemFree_v2(address.value) == 0


def test_new_memory_at_a_freed_address_has_another_handle() -> None:
    first = DeviceMemory(64 * MIB, 0)
    address, handle = first.address, first.handle()
    assert first.handle() == handle
    first.close()
    second = DeviceMemory(64 * MIB, 0)
    reused, other = second.address == address, second.handle()
    second.close()
    assert other != handle
    if not reused:
        pytest.skip("the driver gave out another address, so only the handles were compared")


def test_a_handle_of_a_process_that_died_is_refused() -> None:
    with new_peer() as other:
        text = other.call("allocate_and_export", 4 * MIB)
        opened(text).close()
        other.kill()
        with pytest.raises(CudaMemoryError, match=r"could not be mapped on GPU 0 \(CUDA_ERROR"):
            opened(text)


def test_ones_own_handle_and_one_that_claims_too_much_are_refused(peer: Peer) -> None:
    memory = DeviceMemory(4 * MIB, 0)
    good = memory.handle()
    with pytest.raises(CudaMemoryError, match="must be another one"):
        Mapping(good, 0)
    assert peer.call("refusal", text_of(good)) is None
    greedy = peer.call("refusal", text_of(Handle(good.ipc, good.nbytes + 1, good.gpu)))
    assert greedy is not None and f"claims {good.nbytes + 1} bytes" in greedy
    memory.close()


def test_the_same_memory_opened_twice_outlives_the_first_close(peer: Peer) -> None:
    memory = DeviceMemory(2 * MIB, 0)
    memory.tensor.fill_(7)
    torch.cuda.synchronize()
    assert peer.call("open_twice", text_of(memory.handle())) == (True, 7, 7)
    memory.close()


def test_closed_memory_is_free_again_in_both_processes(peer: Peer) -> None:
    nbytes = 256 * MIB
    for _ in range(2):  # the first round lets each process set up what it keeps
        before = free_bytes()
        memory = DeviceMemory(nbytes, 0)
        alone = free_bytes()
        peer.call("hold", text_of(memory.handle()))
        mapped = free_bytes()
        peer.call("let_go")
        memory.close()
        after = free_bytes()
    assert abs(before - alone - nbytes) <= FREE_TOLERANCE
    assert abs(alone - mapped) <= FREE_TOLERANCE, "a mapping took memory of its own"
    assert abs(before - after) <= FREE_TOLERANCE


def test_a_tensor_that_was_mapped_is_freed_as_any_other(peer: Peer) -> None:
    for _ in range(2):
        torch.cuda.empty_cache()
        before = free_bytes()
        tensor = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
        peer.call("hold", text_of(export(base_of(tensor.data_ptr())[0])))
        peer.call("let_go")
        held_bytes = before - free_bytes()
        del tensor
        torch.cuda.empty_cache()
        after = free_bytes()
    assert held_bytes >= 256 * MIB
    assert abs(before - after) <= FREE_TOLERANCE


def test_more_than_the_device_has_is_refused_with_advice() -> None:
    with pytest.raises(CudaMemoryError, match=r"CUDA_ERROR_OUT_OF_MEMORY\); make the bucket"):
        DeviceMemory(1 << 44, 0)
    with pytest.raises(CudaMemoryError, match="sees no GPU 4096"):
        DeviceMemory(1, 4096)


def test_a_thread_that_never_used_cuda_can_do_all_of_it() -> None:
    tensor = torch.ones(MIB, dtype=torch.uint8, device="cuda")
    found: list[Any] = []

    def work() -> None:
        found.append(exportable(tensor.data_ptr()))
        found.append(base_of(tensor.data_ptr()))
        found.append(export(found[1][0]).gpu)
        memory = DeviceMemory(2 * MIB, 0)
        memory.tensor.fill_(3)
        found.append(int(memory.tensor.sum()))
        memory.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    assert found == [True, base_of(tensor.data_ptr()), uuid, 3 * 2 * MIB]
