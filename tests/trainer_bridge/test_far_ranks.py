"""Two trainer ranks and an engine on another host: weights are gathered, and sent once.

Real FSDP2 over gloo, and TCP to the engine's relay; the engine is in the process of the first rank.
"""

import logging
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import pytest
from torch.distributed.tensor import DTensor

from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge import ranks
from tests.trainer_bridge.served import left
from tests.trainer_bridge.test_far_engine import (
    IMAGE_BYTES,
    SMALL,
    failing_in_chunk,
    remote_engine,
    step,
)
from tests.trainer_bridge.test_fsdp import failure, gathered, toy_trainer
from tests.trainer_bridge.test_update import engine_of, holds
from trainer_bridge import update

WORLD = 2
COLLECTIVE_TIMEOUT_S = 30
SILENCE_S = 3.0
"""``--fp8rl-session-timeout-s`` where the network stalls."""


def failing(rank: int, how: str) -> AbstractContextManager[None]:
    """A connection that "breaks" or "stalls" in a chunk; only the first rank has one."""
    return failing_in_chunk(3, how) if rank == 0 else nullcontext()


def to_a_remote_engine(rank: int) -> None:
    engine = remote_engine(2, SMALL) if rank == 0 else None
    for version in range(2):
        model = toy_trainer(toy.checkpoint(version))
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        first, second = gathered(update(model, engine, version=version).network_bytes)
        assert first == second > 0
        assert engine is None or left(engine) == f"{version}"
    for version, how in ((2, "breaks"), (3, "stalls")):
        model = toy_trainer(toy.checkpoint(version))
        if engine is not None:
            engine.silence_s = SILENCE_S
        with failing(rank, how):
            found = failure(partial(update, model, engine, version=version))
        assert found[0] == "EngineError"
        assert engine is None or left(engine) == "quarantined"
        if engine is not None:
            engine.silence_s = 30.0
        update(model, engine, version=version)  # the way back
        assert engine is None or left(engine) == f"{version}"


def to_one_local_and_one_remote(rank: int) -> None:
    """The one here is sent BF16 of the same gathered tensors, and commits without the other."""
    engines = [engine_of(1, SMALL), remote_engine(2, SMALL)] if rank == 0 else None
    update(toy_trainer(toy.checkpoint(0)), engines, version=0)
    assert engines is None or [left(engine) for engine in engines] == ["0", "0"]
    model = toy_trainer(toy.checkpoint(1))
    with failing(rank, "breaks"):
        result = update(model, engines, version=1, require=1)
    assert gathered([*result.failed]) == [["engine 1"]] * WORLD
    assert engines is None or [left(engine) for engine in engines] == ["1", "quarantined"]
    assert update(model, engines, version=1).failed == {}
    assert engines is None or [left(engine) for engine in engines] == ["1", "1"]


def only_what_changed(rank: int) -> None:
    engine: FakeEngine | None = remote_engine(1, SMALL, IMAGE_BYTES) if rank == 0 else None
    for version in range(3):
        tensors = step(toy.checkpoint(0), version) if version else toy.checkpoint(0)
        result = update(toy_trainer(tensors), engine, version=version)
        assert engine is None or holds(engine, tensors)
        assert (result.network_bytes < 0.1 * result.bytes) == (version > 0)


def each_way(rank: int, folder: Path) -> None:
    logging.disable(logging.CRITICAL)
    to_a_remote_engine(rank)
    to_one_local_and_one_remote(rank)
    only_what_changed(rank)


@pytest.mark.guarantee("quarantine", fault="the network fails below two ranks of a trainer")
@pytest.mark.timeout(180)
def test_two_ranks_update_an_engine_on_another_host(tmp_path: Path) -> None:
    """Every rank hears the one failure; were a rank not told, the next collective would hang. Were
    the shards of one rank sent for the whole, the bytes would not be the oracle's."""
    ranks.run(each_way, tmp_path, WORLD, COLLECTIVE_TIMEOUT_S)
