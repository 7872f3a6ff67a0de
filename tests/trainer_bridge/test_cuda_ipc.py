"""Where parameters lie, as an engine is told; the driver's part is tested in ``tests/gpu``."""

import gc
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sgl_fp8rl.protocol.cuda_memory import CudaMemoryError, Handle
from trainer_bridge.transport import cuda_ipc
from trainer_bridge.transport.cuda_ipc import DeviceBucket, Placement, place
from trainer_bridge.transport.rank_client import UnreachableMemoryError

GPU = "GPU-00000000-0000-0000-0000-000000000000"
ALLOCATION = 1 << 12
"""Bytes; the fake driver's allocations follow each other without a gap."""


class Driver:
    """Every allocation is as large as the others, and its handle counts how often it was made."""

    def __init__(self) -> None:
        self.private: set[int] = set()
        """Bases that cannot be exported."""
        self.made: dict[int, int] = {}

    def base_of(self, address: int) -> tuple[int, int]:
        return address // ALLOCATION * ALLOCATION, ALLOCATION

    def exportable(self, base: int) -> bool:
        return base not in self.private

    def export(self, base: int) -> Handle:
        return Handle(f"{base:0120x}{self.made.get(base, 0):08x}", ALLOCATION, GPU)

    def still_there(self, bases: Iterable[int], handles: Iterable[Handle], device: int) -> bool:
        return [self.export(base) for base in bases] == list(handles)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    for name in ("base_of", "exportable", "export", "still_there"):
        monkeypatch.setattr(cuda_ipc, name, getattr(driver, name))
    return driver


class At(torch.Tensor):
    """A tensor that claims to lie at an address."""

    address: int

    def data_ptr(self) -> int:
        return self.address


def at(*addresses: int) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for address in addresses:
        tensor = torch.empty(0).as_subclass(At)
        tensor.address = address
        tensors.append(tensor)
    return tensors


def placed(tensors: list[torch.Tensor]) -> Placement:
    placement = place(tensors)
    assert placement is not None
    return placement


def test_parameters_of_one_allocation_share_its_handle(driver: Driver) -> None:
    second = 2 * ALLOCATION
    placement = placed(at(ALLOCATION + 64, ALLOCATION + 512, second, ALLOCATION))
    assert placement.bases == (ALLOCATION, second)
    assert placement.handles == (driver.export(ALLOCATION), driver.export(second))
    assert placement.spots == ((0, 64), (0, 512), (1, 0), (0, 0))


def test_an_allocation_begins_where_the_one_before_it_ends(driver: Driver) -> None:
    last = 2 * ALLOCATION - 1
    assert placed(at(last, last + 1)).spots == ((0, ALLOCATION - 1), (1, 0))


def test_memory_that_cannot_be_exported(driver: Driver) -> None:
    """One such parameter is enough: all are copied then."""
    driver.private = {2 * ALLOCATION}
    assert place(at(ALLOCATION, 2 * ALLOCATION + 8)) is None
    assert place(at(ALLOCATION)) is not None


def test_it_holds_what_has_not_moved(driver: Driver) -> None:
    tensors = at(ALLOCATION + 64, 2 * ALLOCATION)
    placement = placed(tensors)
    assert placement.holds(tensors)
    assert placement.holds(at(ALLOCATION + 64, 2 * ALLOCATION))
    assert not placement.holds(at(ALLOCATION + 128, 2 * ALLOCATION))
    assert not placement.holds(tensors[::-1])
    assert not placement.holds(tensors[:1])
    driver.made[2 * ALLOCATION] = 1  # freed, and the address was given out again
    assert not placement.holds(tensors)


def test_what_ranks_are_told(driver: Driver) -> None:
    placement = placed(at(ALLOCATION + 64, 2 * ALLOCATION))
    told = placement.message({"a": (0, 0), "a2": (0, 32), "b": (1, 16)})
    assert told["op"] == "segments"
    assert told["handles"] == [handle.to_json() for handle in placement.handles]
    assert told["places"] == {"a": [0, 64], "a2": [0, 96], "b": [1, 16]}


def test_its_name_changes_with_what_is_told(driver: Driver) -> None:
    """Else a rank that knows the name would read elsewhere."""
    places = {"a": (0, 0)}
    placement = replace(placed(at(ALLOCATION)), seed="s")
    first = placement.message(places)["name"]
    assert placement.message(places)["name"] == first
    assert replace(placed(at(ALLOCATION)), seed="s").message(places)["name"] == first
    names = {
        first,
        placement.message({"a": (0, 4)})["name"],
        placement.message({"b": (0, 0)})["name"],
        replace(placed(at(2 * ALLOCATION)), seed="s").message(places)["name"],
    }
    driver.made[ALLOCATION] = 1
    names.add(replace(placed(at(ALLOCATION)), seed="s").message(places)["name"])
    assert len(names) == 5


def test_what_two_processes_place_has_two_names(driver: Driver) -> None:
    """Both may be given the same handle, and a rank that knows the name maps nothing anew."""
    told = [placed(at(ALLOCATION)).message({"a": (0, 0)}) for _ in range(2)]
    assert told[0]["handles"] == told[1]["handles"]
    assert told[0]["places"] == told[1]["places"]
    assert told[0]["name"] != told[1]["name"]


def test_buckets_of_one_handle_have_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(
        close=lambda: None,
        handle=lambda: Handle("ab" * 64, ALLOCATION, GPU),
        tensor=torch.empty(ALLOCATION, dtype=torch.uint8),
    )
    monkeypatch.setattr(cuda_ipc, "DeviceMemory", lambda nbytes, device: memory)
    first, second = (DeviceBucket(ALLOCATION, torch.device("cuda", 0)) for _ in range(2))
    assert first._handle == second._handle
    assert first.name != second.name


def test_a_bucket_on_a_system_without_cuda_ipc(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is freed, and the caller may turn to host memory."""
    closed = []

    def refuse() -> Handle:
        raise CudaMemoryError("not supported")

    memory = SimpleNamespace(close=lambda: closed.append(True), handle=refuse)
    monkeypatch.setattr(cuda_ipc, "DeviceMemory", lambda nbytes, device: memory)
    with pytest.raises(UnreachableMemoryError, match="not supported") as refused:
        DeviceBucket(ALLOCATION, torch.device("cuda", 0))
    del refused
    gc.collect()
    assert closed == [True]
