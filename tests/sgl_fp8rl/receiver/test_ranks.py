"""What the ranks of an engine tell each other, over gloo."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.trainer_bridge import ranks as job

WORLD = 2
TIMEOUT_S = 60.0


def values(longest: int) -> list[Any]:
    """One of each rank: the first is short, the second a string of this length."""
    return [{"error": None, "idle": True}, "x" * longest]


def exchange(rank: int, folder: Path) -> None:
    from sgl_fp8rl.receiver.host import ROOM, gather

    collectives = 0
    original = dist.all_gather

    def counted(*args: Any, **keywords: Any) -> Any:
        nonlocal collectives
        collectives += 1
        return original(*args, **keywords)

    dist.all_gather = counted
    group = dist.group.WORLD
    assert group is not None
    # around the room of the first collective, whatever pickle adds, and far beyond it
    for longest in (0, *range(ROOM - 40, ROOM + 2), 3 * ROOM):
        before = collectives
        assert gather(values(longest)[rank], group) == values(longest)
        fits = len(pickle.dumps(values(longest)[1])) <= ROOM
        assert collectives - before == (1 if fits else 2)


def test_values_of_any_length_arrive_on_all_ranks(tmp_path: Path) -> None:
    job.run(exchange, tmp_path, WORLD, TIMEOUT_S)


def test_one_rank_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    from sgl_fp8rl.receiver.host import gather

    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    monkeypatch.delattr(dist, "all_gather")
    assert gather({"a": 1}, dist.ProcessGroup) == [{"a": 1}]  # type: ignore[arg-type]
