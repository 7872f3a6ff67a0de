"""How the control channel drains an engine before a session, and what it does where that fails."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)
from sglang.srt.managers.io_struct import AbortReq

from sgl_fp8rl.engine import control as control_module
from sgl_fp8rl.engine.control import Control, ControlError
from trainer_bridge.engine_client import HTTP_TIMEOUT_S

pytestmark = pytest.mark.timeout(60)

BUSY: dict[str, Any] = {"busy": True}
BEGUN: dict[str, Any] = {"sockets": ["a.sock"]}


class Engine:
    """A control channel whose schedulers answer ``begin`` as told, the last answer for ever."""

    def __init__(self, patch: pytest.MonkeyPatch, *answers: dict[str, Any]) -> None:
        self.asked: list[dict[str, Any]] = []
        self.sent: list[Any] = []
        self.manager = SimpleNamespace(
            is_pause=False,
            is_pause_cond=asyncio.Condition(),
            auto_create_handle_loop=lambda: None,
            _dispatch_to_scheduler=self.sent.append,
        )
        rpc: Any = None
        self.control = Control(self.manager, rpc, SimpleNamespace(tp_size=1))
        self._answers = list(answers)
        patch.setattr(self.control, "_ask", self._ask)
        patch.setattr(self.control, "_receive", self._receive)

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self.manager.is_pause
        self.asked.append(dict(message))
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

    async def _receive(self) -> dict[str, Any]:
        return {"ended": True}

    def begin(self, **more: Any) -> dict[str, Any]:
        message = {"op": "begin", "version": 0, "fingerprint": "f", "manifest": {}, **more}

        async def session() -> dict[str, Any]:
            begun = await self.control.handle(message)
            assert self.manager.is_pause is ("sockets" in begun)
            if "sockets" in begun:
                assert await self.control.handle({"op": "end"}) == {"ended": True}
            return begun

        return asyncio.run(session())


def test_requests_are_aborted_until_the_session_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, BUSY, BUSY, BEGUN)
    assert engine.begin()["sockets"] == BEGUN["sockets"]
    assert [type(sent) for sent in engine.sent] == [AbortReq] * 2
    assert all(sent.abort_all for sent in engine.sent)
    assert ["manifest" in message for message in engine.asked] == [True, False, False]
    assert not engine.manager.is_pause


@pytest.mark.parametrize("in_flight", ["finish", "retract"])
def test_no_request_is_aborted_where_that_was_not_chosen(
    monkeypatch: pytest.MonkeyPatch, in_flight: str
) -> None:
    engine = Engine(monkeypatch, BUSY, BUSY, BEGUN)
    assert engine.begin(in_flight=in_flight)["sockets"] == BEGUN["sockets"]
    assert engine.sent == []
    assert [message["in_flight"] for message in engine.asked] == [in_flight] * 3
    assert not engine.manager.is_pause


def test_an_unknown_choice_is_refused_before_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, BEGUN)
    with pytest.raises(ControlError, match=r"in_flight.*'wait'.*abort, finish") as no:
        engine.begin(in_flight="wait")
    assert no.value.status == 400
    assert engine.asked == []
    assert not engine.manager.is_pause


def test_a_session_that_begins_at_the_deadline_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks wait for the trainer: given up here, they would wait for it in vain."""
    monkeypatch.setattr(control_module, "DRAIN_TIMEOUT_S", -1.0)
    engine = Engine(monkeypatch, BUSY, BEGUN)
    assert engine.begin()["sockets"] == BEGUN["sockets"]
    assert not engine.manager.is_pause


@pytest.mark.parametrize(
    ("in_flight", "limit"),
    [("abort", "DRAIN"), ("retract", "DRAIN"), ("finish", "FINISH")],
)
def test_requests_that_do_not_end_are_given_up_on(
    monkeypatch: pytest.MonkeyPatch, in_flight: str, limit: str
) -> None:
    monkeypatch.setattr(control_module, f"{limit}_TIMEOUT_S", -1.0)
    engine = Engine(monkeypatch, BUSY)
    with pytest.raises(ControlError, match=f"in_flight.*'{in_flight}'") as refused:
        engine.begin(in_flight=in_flight)
    assert refused.value.status == 503
    assert not engine.manager.is_pause


def test_the_trainer_still_listens_when_a_long_wait_is_given_up() -> None:
    assert control_module.FINISH_TIMEOUT_S + control_module.DRAIN_TIMEOUT_S / 2 <= HTTP_TIMEOUT_S
