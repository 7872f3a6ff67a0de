"""A trainer rank that does not lead is killed: the first one ends the update, and goes on.

Two real processes of one job over gloo; the engines are in this one, behind HTTP.
"""

import logging
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge import fake_ipc, ranks
from tests.trainer_bridge.served import left, served
from tests.trainer_bridge.shards_job import GpuEngine, Trainer
from tests.trainer_bridge.test_gathering import distributed
from tests.trainer_bridge.test_update import SMALL, engine_of
from trainer_bridge import update
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.ranks import collective
from trainer_bridge.ranks.collective import Leader
from trainer_bridge.shards.codes_memory import CodesMemory
from trainer_bridge.sources.parameters import Source
from trainer_bridge.updates import weights

pytestmark = pytest.mark.timeout(180)

WORLD = 2
COLLECTIVE_TIMEOUT_S = 30
SILENCE_S, GIVE_UP_S = 15.0, 5.0
"""In the place of 300 s that engines hear nothing, and of an hour that the first rank waits for
the other one."""
AFTER = 9
"""The version that the first rank sends alone."""
PRESENCE_S = 3.0
"""In the place of 60 s."""
Die = Callable[[pytest.MonkeyPatch], None]


def before_it_asks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leader, "each", ranks.die)


def before_all_gather(patch: pytest.MonkeyPatch) -> None:
    """The engines have begun."""
    patch.setattr(Source, "read", ranks.die)


def while_all_gather(patch: pytest.MonkeyPatch) -> None:
    read, until = Source.read, [5]

    def read_and_die(self: Source, parameter: torch.Tensor) -> torch.Tensor:
        until[0] -= 1
        if not until[0]:
            ranks.die()
        return read(self, parameter)

    patch.setattr(Source, "read", read_and_die)


class Watched(FakeEngine):
    """It notes what it serves when the update after the fault begins."""

    before = ""

    def _begin(self, message: dict[str, Any]) -> dict[str, Any]:
        is_over = message["version"] == AFTER
        self.before = left(self) if is_over else ""
        self.silence_s = 30.0 if is_over else SILENCE_S
        return super()._begin(message)


def killed_while_it_follows(
    rank: int, folder: Path, engines: list[str], die: Die, error: str
) -> None:
    logging.disable(logging.CRITICAL)
    mesh = init_device_mesh("cpu", (WORLD,))
    named = [distributed(toy.checkpoint(version), mesh, (Shard(0),)) for version in (0, 1)]
    update(named[0], engines, version=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective, "WAIT_S", GIVE_UP_S)
        if rank == 1:
            die(patch)
        with pytest.raises((EngineError, TimeoutError, RuntimeError), match=error):
            update(named[1], engines, version=1)
    assert rank == 0
    update(toy.checkpoint(AFTER), engines, version=AFTER)  # alone, with all of the weights


@pytest.mark.guarantee("several-engines", fault="the second of two trainer ranks is killed")
@pytest.mark.parametrize(
    ("die", "error", "found"),
    [
        (before_it_asks, "another rank did not call it", "0"),
        (before_all_gather, "", "0"),
        (while_all_gather, "", "quarantined"),
    ],
)
def test_another_rank_is_killed(die: Die, error: str, found: str, tmp_path: Path) -> None:
    """The first one ends the update on all engines, and sends the next one alone. Were the bucket
    sent with what it happens to hold, the engines would serve rows of the version before."""
    engines = [Watched(engine_of(tp, SMALL).ranks, SMALL) for tp in (1, 2)]
    with served(engines) as addresses:
        worker = partial(killed_while_it_follows, engines=addresses, die=die, error=error)
        ranks.run_and_lose(worker, tmp_path, WORLD, COLLECTIVE_TIMEOUT_S, lost=1)
    assert [engine.before for engine in engines] == [found, found]
    assert [left(engine) for engine in engines] == [f"{AFTER}"] * 2


def while_engines_read_its_shards(patch: pytest.MonkeyPatch) -> None:
    """Before it is asked whether it is still there."""
    share, left_to_hear = Leader.share, iter([1, 0])

    def share_or_die(self: Leader, value: Any) -> Any:
        return share(self, value) if next(left_to_hear) else ranks.die()

    patch.setattr(Leader, "share", share_or_die)


def while_it_quantizes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CodesMemory, "bad", ranks.die)


def killed_beside_its_shards(rank: int, folder: Path, engines: list[str], die: Die) -> None:
    logging.disable(logging.CRITICAL)
    with pytest.MonkeyPatch.context() as patch:
        memories, _ = fake_ipc.install(patch)
        trainer = Trainer(memories, rank)
        for version in range(3):
            update(trainer.become(toy.checkpoint(version)), engines, version=version)
        # the package's ``update`` is the function
        patch.setattr(import_module("trainer_bridge.updates.update"), "PRESENCE_S", PRESENCE_S)
        patch.setattr(weights, "CODES_S", PRESENCE_S)
        if rank == 1:
            die(patch)
        with pytest.raises(TimeoutError, match="another rank did not call it"):
            update(trainer.become(toy.checkpoint(3)), engines, version=3)
        assert rank == 0
        update(toy.checkpoint(AFTER), engines, version=AFTER)


class WatchedGpu(Watched, GpuEngine):
    """On GPUs."""


@pytest.mark.guarantee("several-engines", fault="a trainer rank whose shards are read is killed")
@pytest.mark.parametrize(
    ("die", "found"), [(while_engines_read_its_shards, "quarantined"), (while_it_quantizes, "2")]
)
def test_a_rank_is_killed_whose_shards_are_read(
    die: Die, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory may be anything by then. If the first one did not ask, both would commit."""
    _, interpreter = fake_ipc.install(monkeypatch)
    engines = [WatchedGpu(interpreter.writable) for _ in range(2)]
    with served(engines) as addresses:
        worker = partial(killed_beside_its_shards, engines=addresses, die=die)
        ranks.run_and_lose(worker, tmp_path, WORLD, COLLECTIVE_TIMEOUT_S, lost=1)
    assert [engine.before for engine in engines] == [found] * 2
    assert [left(engine) for engine in engines] == [f"{AFTER}"] * 2
