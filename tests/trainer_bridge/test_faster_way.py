"""Whether an update goes whole or as changes: by what both took. Real TCP, no SGLang."""

import socket
import time

import pytest
import torch

from sgl_fp8rl.ops.delta import difference
from sgl_fp8rl.protocol import image
from tests.sgl_fp8rl.weight_update import toy
from tests.trainer_bridge.test_far_engine import IMAGE_BYTES, SMALL, holds, remote_engine, step
from trainer_bridge import faster_way
from trainer_bridge.connections import connection_to
from trainer_bridge.faster_way import FasterWay
from trainer_bridge.update import update

WHOLE, CHANGES = True, False


def way_of(*updates: tuple[bool, float]) -> FasterWay:
    way = FasterWay("")
    for update_ in updates:
        way.note(*update_)
    return way


@pytest.mark.parametrize(
    ("updates", "whole"),
    [
        ([], CHANGES),
        ([(WHOLE, 1.0)], CHANGES),
        ([(WHOLE, 1.0), (CHANGES, 9.0)], CHANGES),  # one may have compiled kernels
        ([(WHOLE, 1.0), (CHANGES, 9.0), (CHANGES, 0.5)], CHANGES),
        ([(WHOLE, 1.0), (CHANGES, 9.0), (CHANGES, 3.0)], WHOLE),
        ([(WHOLE, 1.0), (CHANGES, 9.0), (CHANGES, 1.05)], CHANGES),  # noise
        ([(WHOLE, 0.01), (CHANGES, 0.1), (CHANGES, 0.1)], CHANGES),
        ([(WHOLE, 1.0), (CHANGES, 9.0), (CHANGES, 3.0), (WHOLE, 4.0)], WHOLE),  # a slow one
        ([(WHOLE, 1.0), *2 * [(CHANGES, 3.0)], *2 * [(WHOLE, 4.0)]], CHANGES),
    ],
)
def test_the_way_that_took_less_time(updates: list[tuple[bool, float]], whole: bool) -> None:
    assert way_of(*updates).goes_whole() == whole


@pytest.mark.parametrize("usual", [WHOLE, CHANGES])
@pytest.mark.parametrize(("slower_s", "is_tried"), [(1.9, True), (2.1, False)])
def test_the_other_way_is_tried_again_where_it_was_not_much_slower(
    usual: bool, slower_s: float, is_tried: bool
) -> None:
    seconds = {usual: 1.0, not usual: slower_s}
    way = way_of(*2 * [(WHOLE, seconds[WHOLE])], *2 * [(CHANGES, seconds[CHANGES])])
    went = []
    for _ in range(3 * faster_way.RETRY):
        went.append(way.goes_whole())
        way.note(went[-1], seconds[went[-1]])
    assert went.count(not usual) == (2 if is_tried else 0)


def test_a_first_update_that_compiles_is_not_the_last_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    way = way_of((WHOLE, 10.0), *2 * [(CHANGES, 4.0)])
    went = []
    for _ in range(3 * faster_way.RETRY):
        went.append(way.goes_whole())
        way.note(went[-1], 1.0 if went[-1] else 4.0)
    assert not any(went[: faster_way.RETRY - 2]) and all(went[faster_way.RETRY :])
    (record,) = caplog.records
    assert "whole from now on: a whole one took 1.00 s, only what changed 4.00" in record.message


def network_parts(count: int) -> list[float]:
    """Of the bytes of each of so many updates, what went over the network."""
    engine, tensors, parts = remote_engine(1, SMALL, IMAGE_BYTES), toy.checkpoint(0), []
    for version in range(count):
        tensors = step(tensors, version)
        result = update(tensors, engine, version=version)
        assert holds(engine, tensors), version
        parts.append(result.network_bytes / result.bytes)
    return parts


def test_an_engine_that_joins_goes_by_what_others_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is named first, and of both one alone is sent changes."""
    slow_comparison(monkeypatch, 0.3)
    engine, joins = (remote_engine(1, SMALL, IMAGE_BYTES) for _ in range(2))
    tensors, parts = toy.checkpoint(0), []
    for version in range(7):
        tensors = step(tensors, version)
        engines = [joins, engine] if version == 4 else [engine]
        result = update(tensors, engines, version=version)
        assert all(holds(each, tensors) for each in engines)
        parts.append(result.network_bytes / result.bytes / len(engines))
    assert [part > 0.1 for part in parts] == [True, False, False, True, True, True, True]


def test_a_whole_update_frees_the_image_of_the_last_one() -> None:
    engine, away = (remote_engine(1, SMALL, IMAGE_BYTES) for _ in range(2))
    tensors = toy.checkpoint(0)
    update(tensors, [engine, away], version=0)
    last = connection_to(away).image
    assert last is not None and last[1]._chunks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FasterWay, "goes_whole", lambda _: True)
        update(tensors, engine, version=1)
    assert not last[1]._chunks  # though the other engine was not asked
    tensors = step(tensors, 2)
    update(tensors, [engine, away], version=2)
    assert holds(engine, tensors) and holds(away, tensors)


def slow_comparison(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """As of a large model on a CPU: so long for each chunk."""

    def slow(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
        time.sleep(seconds)
        return difference(old, new)

    patch.setattr(image, "difference", slow)


def test_a_slow_comparison_on_a_fast_network(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow_comparison(monkeypatch, 0.3)
    assert [part > 0.1 for part in network_parts(6)] == [True, False, False, True, True, True]
    (record,) = caplog.records
    assert "updates are sent whole from now on" in record.getMessage()


def test_a_slow_network(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    whole, rate = socket.socket.sendall, 2e5

    def sendall(self: socket.socket, data: bytes) -> None:
        if self.family == socket.AF_INET and isinstance(data, memoryview):
            time.sleep(len(data) / rate)
        whole(self, data)

    monkeypatch.setattr(socket.socket, "sendall", sendall)
    slow_comparison(monkeypatch, 0.01)
    assert [part > 0.1 for part in network_parts(6)] == [True] + [False] * 5
    assert not caplog.records
