"""How two ranks end an update together: what goes back, and what is quarantined."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.receiver import update_steps
from sgl_fp8rl.receiver.rank_server import Outcome
from tests.sgl_fp8rl.receiver.fake_host import Exchange, FakeHost

CLEAN = Outcome(False, "aborted", dirty=False)
CHANGED = Outcome(False, "aborted", dirty=True, goes_back=True)
WHOLE = Outcome(False, "aborted", dirty=True)
VOTED = Outcome(False, "the trainer is gone", dirty=True, voted=True)
COMMITTED = Outcome(True, "", dirty=True)


class Rank:
    """What ``update_steps`` drives, and what it did."""

    why_not_generate = "quarantined"
    status: ClassVar[dict[str, Any]] = {}

    def __init__(self, undo: Callable[[], None]) -> None:
        self.did: list[str] = []
        self.session = SimpleNamespace(undo=lambda: (self.did.append("undo"), undo()))
        self.memory = SimpleNamespace(close=lambda: None)

    def resume(self) -> None:
        self.did.append("resume")

    def quarantine(self, reason: str, voted_for: str) -> None:
        self.did.append("quarantine, in doubt" if voted_for else "quarantine")

    def commit(self, transaction: str) -> None:
        self.did.append("commit")


def cannot() -> None:
    raise RuntimeError("no memory")


def can() -> None:
    pass


@pytest.mark.parametrize(
    ("mine", "other", "undo", "error_of_other", "did"),
    [
        (CHANGED, CHANGED, can, None, ["undo", "resume"]),
        (CHANGED, CLEAN, can, None, ["undo", "resume"]),
        (CLEAN, CHANGED, can, None, ["undo", "resume"]),
        (CLEAN, CLEAN, can, None, ["resume"]),
        (CHANGED, WHOLE, can, None, ["quarantine"]),
        (CHANGED, VOTED, can, None, ["quarantine"]),
        (VOTED, VOTED, can, None, ["quarantine, in doubt"]),
        (VOTED, COMMITTED, can, None, ["commit"]),
        (CHANGED, CHANGED, cannot, None, ["undo", "quarantine"]),
        (CHANGED, CHANGED, can, "no memory", ["undo", "quarantine"]),
    ],
)
def test_all_ranks_go_back_or_none(
    mine: Outcome,
    other: Outcome,
    undo: Callable[[], None],
    error_of_other: str | None,
    did: list[str],
) -> None:
    class Host(FakeHost):
        def gather(self, value: Any) -> list[Any]:
            return [value, other if isinstance(value, Outcome) else error_of_other]

    rank: Any = Rank(undo)
    host = Host(0, Exchange(1), lambda _: None)
    reply = update_steps._end(host, rank, Policy("r", 1), "t", mine, None)
    assert rank.did == did
    assert reply["ended"] == bool(host.policies) == ("commit" in did)
    assert bool(host.refused) == any(word.startswith("quarantine") for word in did)
