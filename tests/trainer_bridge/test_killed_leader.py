"""The trainer rank that speaks with the engines is killed: what they serve then, and the way back.

Two real processes of one job over gloo; the engines are in this one.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.receiver import rank_server
from tests.sgl_fp8rl.receiver import toy
from tests.trainer_bridge import ranks
from tests.trainer_bridge.served import left, served
from tests.trainer_bridge.test_gathering import distributed
from tests.trainer_bridge.test_update import SMALL, engine_of
from trainer_bridge import update
from trainer_bridge.ranks import collective
from trainer_bridge.session import transaction
from trainer_bridge.session.participant import Participant
from trainer_bridge.session.transaction import Transaction
from trainer_bridge.session.update_session import UpdateSession
from trainer_bridge.transport.rank_client import RankClients

pytestmark = pytest.mark.timeout(180)

WORLD = 2
COLLECTIVE_TIMEOUT_S = 30
GIVE_UP_S = 5.0
"""In the place of the hour that the other rank waits for it."""
CONNECT_S = 10.0
"""In the place of the 30 s that engines wait for a connection."""
Die = Callable[[pytest.MonkeyPatch], None]


def when_none_is_connected(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RankClients, "__init__", ranks.die)


def when_one_is_connected(patch: pytest.MonkeyPatch) -> None:
    begin = Participant.begin

    def begin_and_die(self: Participant, *args: Any) -> None:
        if connected:
            when_none_is_connected(patch)
        connected.append(self)
        begin(self, *args)

    connected: list[Participant] = []
    patch.setattr(Participant, "begin", begin_and_die)


def before_the_vote(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UpdateSession, "finish", ranks.die)


def between_vote_and_commit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Transaction, "commit", ranks.die)


def between_two_commits(patch: pytest.MonkeyPatch) -> None:
    commit = Participant.commit

    def commit_and_die(self: Participant, policy: Policy) -> None:
        commit(self, policy)
        ranks.die()

    patch.setattr(Participant, "commit", commit_and_die)


def killed_while_it_leads(rank: int, folder: Path, engines: list[str], die: Die) -> None:
    logging.disable(logging.CRITICAL)
    mesh = init_device_mesh("cpu", (WORLD,))
    named = [distributed(toy.checkpoint(version), mesh, (Shard(0),)) for version in (0, 1)]
    update(named[0], engines, version=0, run="killed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective, "WAIT_S", GIVE_UP_S)
        if rank == 0:
            # one after the other, so that it is known which of them were told
            patch.setattr(transaction, "side_by_side", lambda calls: [call() for _, call in calls])
            die(patch)
        with pytest.raises(TimeoutError, match="the first rank sent nothing"):
            update(named[1], engines, version=1, run="killed")
        assert rank == 1


@pytest.mark.guarantee("several-engines", fault="the first of two trainer ranks is killed")
@pytest.mark.parametrize(
    ("die", "found"),
    [
        (when_none_is_connected, ["0", "0"]),
        (when_one_is_connected, ["quarantined", "0"]),
        (before_the_vote, ["quarantined", "quarantined"]),
        (between_vote_and_commit, ["quarantined", "quarantined"]),
        (between_two_commits, ["1", "quarantined"]),
    ],
)
def test_the_rank_that_leads_is_killed(
    die: Die, found: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody serves what was not committed, the other rank hears of it, and the next trainer's
    first update heals all. If ranks took a lost trainer for a commit, ``found`` would differ."""
    monkeypatch.setattr(rank_server, "CONNECT_TIMEOUT_S", CONNECT_S)
    engines = [engine_of(1, SMALL), engine_of(2, SMALL)]
    with served(engines) as addresses:
        worker = partial(killed_while_it_leads, engines=addresses, die=die)
        ranks.run_and_lose(worker, tmp_path, WORLD, COLLECTIVE_TIMEOUT_S, lost=0)
        for engine in engines:
            engine.control({"op": "end"})
        assert [left(engine) for engine in engines] == found
        update(toy.checkpoint(2), addresses, version=2, run="the next one")
        assert [left(engine) for engine in engines] == ["2", "2"]
