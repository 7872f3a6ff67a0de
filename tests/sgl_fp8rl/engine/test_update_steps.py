"""How two ranks end an update together: what goes back, and what is quarantined."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_fp8rl.engine import update_steps
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.weight_update.rank_server import Outcome

CLEAN = Outcome(False, "aborted", dirty=False)
CHANGED = Outcome(False, "aborted", dirty=True, goes_back=True)
WHOLE = Outcome(False, "aborted", dirty=True)
VOTED = Outcome(False, "the trainer is gone", dirty=True, voted=True)
COMMITTED = Outcome(True, "", dirty=True)


class Rank:
    """What ``update_steps`` drives, and what it did."""

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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gathered(value: Any, group: object) -> list[Any]:
        return [value, other if isinstance(value, Outcome) else error_of_other]

    for name in ("refuse_waiting", "reply", "_after_commit"):
        monkeypatch.setattr(update_steps, name, lambda *_: None)
    for name in ("status_of", "refusal"):
        monkeypatch.setattr(update_steps, name, lambda _: {})
    monkeypatch.setattr(update_steps, "gather", gathered)
    rank: Any = Rank(undo)
    scheduler = SimpleNamespace(tp_group=SimpleNamespace(cpu_group=None))
    update_steps._end(scheduler, rank, Policy("r", 1), "t", mine, None)
    assert rank.did == did
