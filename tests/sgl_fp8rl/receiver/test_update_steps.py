"""How two ranks end an update together: what goes back, and what is quarantined."""

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.receiver import update_steps
from sgl_fp8rl.receiver.rank_server import Outcome
from tests.sgl_fp8rl.receiver.fake_host import Exchange, FakeHost

CLEAN = Outcome(False, "aborted", dirty=False)
CHANGED = Outcome(False, "aborted", dirty=True, can_roll_back=True)
WHOLE = Outcome(False, "aborted", dirty=True)
VOTED = Outcome(False, "the trainer is gone", dirty=True, voted=True)
COMMITTED = Outcome(True, "", dirty=True)


class Rank:
    """What ``update_steps`` drives, and what it did."""

    why_not_generate = "quarantined"
    status: ClassVar[dict[str, Any]] = {}

    def __init__(self, can_undo: bool) -> None:
        self.did: list[str] = []
        self.can_undo, self.session = can_undo, self
        self.memory = SimpleNamespace(close=lambda: None)
        self.policy = Policy("r", 1)

    def undo(self) -> None:
        self.did.append("undo")
        if not self.can_undo:
            raise RuntimeError("no memory")

    def resume(self) -> None:
        self.did.append("resume")

    def quarantine(self, reason: str, voted_for: str) -> None:
        self.did.append("quarantine, in doubt" if voted_for else "quarantine")

    def commit(self, transaction: str) -> None:
        self.did.append("commit")


@pytest.mark.parametrize(
    ("mine", "other", "can_undo", "error_of_other", "did"),
    [
        (CHANGED, CHANGED, True, None, ["undo", "resume"]),
        (CHANGED, CLEAN, True, None, ["undo", "resume"]),
        (CLEAN, CHANGED, True, None, ["undo", "resume"]),
        (CLEAN, CLEAN, True, None, ["resume"]),
        (CHANGED, WHOLE, True, None, ["quarantine"]),
        (CHANGED, VOTED, True, None, ["quarantine"]),
        (VOTED, VOTED, True, None, ["quarantine, in doubt"]),
        (VOTED, COMMITTED, True, None, ["commit"]),
        (CHANGED, CHANGED, False, None, ["undo", "quarantine"]),
        (CHANGED, CHANGED, True, "no memory", ["undo", "quarantine"]),
    ],
)
def test_all_ranks_go_back_or_none(
    mine: Outcome,
    other: Outcome,
    can_undo: bool,
    error_of_other: str | None,
    did: list[str],
) -> None:
    class Host(FakeHost):
        def gather(self, value: Any) -> list[Any]:
            return [value, other if isinstance(value, Outcome) else error_of_other]

    rank: Any = Rank(can_undo)
    host = Host(0, Exchange(1), lambda _: None)
    reply = update_steps._end(host, rank, "t", mine, None)
    assert rank.did == did
    assert reply["ended"] == bool(host.policies) == ("commit" in did)
    assert bool(host.refused) == any(word.startswith("quarantine") for word in did)


def test_a_fault_names_its_update_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("no memory")

    assert update_steps.attempted(fail, "an update to %s", Policy("r", 1)) == (None, "no memory")
    assert "an update to version 1 of run 'r' failed" in caplog.text
