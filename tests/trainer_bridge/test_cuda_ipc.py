"""Where parameters lie, as an engine is told; the driver's part is tested in ``tests/gpu``."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from sgl_fp8rl.protocol.chunks import Piece
from sgl_fp8rl.protocol.cuda_memory import Handle
from trainer_bridge.transport import cuda_ipc
from trainer_bridge.transport.cuda_ipc import Placement, placement_of, segments_message

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
    placement = placement_of(tensors)
    assert placement is not None
    return placement


def test_parameters_of_one_allocation_share_its_handle(driver: Driver) -> None:
    """One allocation begins where the one before it ends."""
    second = 2 * ALLOCATION
    tensors = at(ALLOCATION + 64, ALLOCATION + 512, second, ALLOCATION, second - 1)
    placement = placed(tensors)
    assert placement.bases == (ALLOCATION, second)
    assert placement.handles == (driver.export(ALLOCATION), driver.export(second))
    assert placement.spots == ((0, 64), (0, 512), (1, 0), (0, 0), (0, ALLOCATION - 1))
    assert placed(tensors).seed != placement.seed


def test_memory_that_cannot_be_exported(driver: Driver) -> None:
    """One such parameter is enough: all are copied then."""
    driver.private = {2 * ALLOCATION}
    assert placement_of(at(ALLOCATION, 2 * ALLOCATION + 8)) is None
    assert placement_of(at(ALLOCATION)) is not None


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


HANDLE = Handle("ab" * 64, 4096, GPU)


def test_its_name_changes_with_what_is_told() -> None:
    """Else a rank that knows the name would read elsewhere. Two processes may be given the same
    handle, and their seeds differ."""
    here, there = [Piece(0, 0, (0, 8))], [Piece(0, 4, (0, 8))]
    name = segments_message(["s"], [HANDLE], {"a": here})["name"]
    assert segments_message(["s"], [HANDLE], {"a": here})["name"] == name
    others = [
        (["s"], [HANDLE], {"a": there}),
        (["s"], [HANDLE], {"b": here}),
        (["s"], [HANDLE], {"a": [*here, *here]}),
        (["s"], [replace(HANDLE, ipc="cd" * 64)], {"a": here}),
        (["t"], [HANDLE], {"a": here}),
        (["s", "t"], [HANDLE], {"a": here}),
    ]
    names = {name, *(segments_message(*other)["name"] for other in others)}
    assert len(names) == 7
