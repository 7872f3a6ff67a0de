"""Engines of one update begin together: none waits for ever, and none is given up meanwhile."""

import threading
from typing import Any

import pytest

from sgl_fp8rl.protocol.states import ABORT, FINISH
from sgl_fp8rl.receiver import rank_server
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge.test_remote_engine import remote_engine
from tests.trainer_bridge.test_transaction import serves
from tests.trainer_bridge.test_update import engine_of
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.session import participant
from trainer_bridge.updates.update import update

pytestmark = pytest.mark.timeout(120)

SILENCE_S = 4.0
"""Engines give up a trainer that is silent for so long."""
STEP_S = 7.0
"""An engine may take so long over a step."""
KEEP_ALIVE_S = 0.2


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(participant, "STEP_TIMEOUT_S", STEP_S)
    monkeypatch.setattr(participant, "KEEP_ALIVE_S", KEEP_ALIVE_S)


class Slow(FakeEngine):
    """Its requests in flight end, or its schedulers wake up, a while after it is told to begin."""

    takes_s = 0.0

    def control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
        if message["op"] == "begin" and self.takes_s > 0:
            threading.Event().wait(min(self.takes_s, timeout_s))
            if timeout_s < self.takes_s:  # as an HTTP client gives up
                raise EngineError("no reply in time")
        return super().control(message)


@pytest.fixture(params=["near", "far"])
def engines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[FakeEngine]:
    """One that begins at once, also on another host, and one that does not; both at version 0."""
    monkeypatch.setenv("FP8RL_KEY", "a key")
    made = [engine_of(2) if request.param == "near" else remote_engine(2), Slow(engine_of(1).ranks)]
    update(toy.checkpoint(), made, version=0)
    made[0].silence_s = SILENCE_S
    return made


@pytest.mark.guarantee("several-engines", fault="one of two engines hangs as it begins")
@pytest.mark.parametrize("require", [0, 1])
def test_one_does_not_begin(engines: list[FakeEngine], require: int) -> None:
    """The other one goes on, or nothing is lost where all must begin."""
    engines[1].takes_s = 60.0  # type: ignore[attr-defined]
    if require:
        result = update(toy.checkpoint(1), engines, version=1, require=1)
        assert list(result.failed) == ["engine 1"]
    else:
        with pytest.raises(EngineError, match="engine 1: no reply in time"):
            update(toy.checkpoint(1), engines, version=1)
    assert serves(engines[0], require, toy.checkpoint(require))
    assert serves(engines[1], 0, toy.checkpoint())


@pytest.mark.parametrize("in_flight", [ABORT, FINISH])
def test_engines_wait_for_one_whose_requests_end_late(
    engines: list[FakeEngine], in_flight: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than they would wait for a silent trainer, and, to the end of requests, than a step
    may take."""
    if in_flight == ABORT:  # what begins late then has its step to end in
        monkeypatch.setattr(participant, "STEP_TIMEOUT_S", 2 * STEP_S)
    engines[1].takes_s = STEP_S + 2.0 if in_flight == FINISH else SILENCE_S + 1.0  # type: ignore[attr-defined]
    update(toy.checkpoint(1), engines, version=1, in_flight=in_flight)
    assert all(serves(each, 1, toy.checkpoint(1)) for each in engines)


def test_without_word_of_the_trainer_they_do_not_wait(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the tests above."""
    monkeypatch.setattr(participant, "KEEP_ALIVE_S", 60.0)
    engines[0].silence_s = 1.0
    engines[1].takes_s = SILENCE_S + 1.0  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match="engine 0: "):
        update(toy.checkpoint(1), engines, version=1)


def test_an_engine_that_hangs_behind_its_begin_delays_no_other(
    engines: list[FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keep-alive message has no reply, so nothing waits for one of a rank that hangs."""
    hangs, awake = engine_of(1), threading.Event()
    update(toy.checkpoint(), hangs, version=0)
    served = rank_server.RankSocket.heard

    def heard(self: rank_server.RankSocket) -> None:
        if hangs.ranks[0].session is not None and str(self.path) in paths:
            awake.wait(30)
        served(self)

    paths: list[str] = []
    began = hangs._begin

    def begin(message: dict[str, Any]) -> dict[str, Any]:
        begun = began(message)
        paths.extend(begun.get("sockets", ()))
        return begun

    monkeypatch.setattr(hangs, "_begin", begin)
    monkeypatch.setattr(rank_server.RankSocket, "heard", heard)
    engines[1].takes_s = SILENCE_S + 1.0  # type: ignore[attr-defined]
    timer = threading.Timer(SILENCE_S + 2.0, awake.set)
    timer.start()
    result = update(toy.checkpoint(1), [hangs, *engines], version=1)
    timer.join()
    assert result.failed == {}
    assert all(serves(each, 1, toy.checkpoint(1)) for each in [hangs, *engines])
