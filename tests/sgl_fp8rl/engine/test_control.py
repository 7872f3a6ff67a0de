"""How the control channel drains an engine before a session, and what it does where that fails."""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
)
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from server_args import Fp8RLServerArgs
from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.control import control as control_module
from sgl_fp8rl.engine.control import control_in_process, scheduler_rpc
from sgl_fp8rl.engine.control.control import Control
from sgl_fp8rl.engine.control.memory_release import release_when_idle, resume_in_turn
from sgl_fp8rl.engine.control.scheduler_rpc import ControlError, SchedulerRpc
from trainer_bridge.engines.engine_client import CONTROL_TIMEOUT_S

pytestmark = pytest.mark.timeout(60)

BUSY: dict[str, Any] = {"busy": True}
BEGUN: dict[str, Any] = {"sockets": ["a.sock"]}


class Engine:
    """A control channel whose schedulers answer as told, the last answer for ever."""

    def __init__(self, patch: pytest.MonkeyPatch, *answers: Any, host: str = "127.0.0.1") -> None:
        self.asked: list[dict[str, Any]] = []
        self.sent: list[Any] = []
        self.versions: list[str] = []
        self.manager = SimpleNamespace(
            is_pause=False,
            is_pause_cond=asyncio.Condition(),
            auto_create_handle_loop=lambda: None,
            _dispatch_to_scheduler=self.sent.append,
            _update_weight_version_if_provided=self.versions.append,
        )
        rpc: Any = None
        arguments = SimpleNamespace(host=host)
        self.control = Control(self.manager, rpc, arguments)
        self._answers = list(answers)
        self.refusal_s = 0.0
        patch.setattr(self.control._schedulers, "ask", self._ask)
        patch.setattr(self.control._schedulers, "receive", self._receive)

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self.manager.is_pause or message["op"] != "begin"
        self.asked.append(dict(message))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, ControlError):
            await asyncio.sleep(self.refusal_s)
            raise answer
        assert isinstance(answer, dict)
        return answer

    async def _receive(self, healthy_s: float, sockets: Sequence[str] = ()) -> dict[str, Any]:
        return {"ended": True, "version": 3}

    def refuses(self, fault: str, **more: Any) -> int:
        """The status of a ``begin`` that is refused; generation goes on."""
        with pytest.raises(ControlError, match=fault) as refused:
            self.begin(**more)
        assert not self.manager.is_pause
        return refused.value.status

    def begin(self, **more: Any) -> dict[str, Any]:
        message = {"op": "begin", "version": 0, "fingerprint": "f", "manifest": {}, **more}

        async def session() -> dict[str, Any]:
            begun = await self.control.handle(message)
            assert self.manager.is_pause is ("token" in begun)
            if "token" in begun:
                assert await self.control.handle({"op": "end"}) == {"ended": True, "version": 3}
            return begun

        return asyncio.run(session())


@pytest.mark.parametrize("chosen", [{}, {"in_flight": "finish"}, {"in_flight": "retract"}])
def test_requests_are_aborted_until_the_session_begins_if_nothing_else_is_chosen(
    monkeypatch: pytest.MonkeyPatch, chosen: dict[str, Any]
) -> None:
    """A sleep after its beginning would be added to every update that waits for requests."""
    waits: list[float] = []
    sleep = asyncio.sleep

    async def counted(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(control_module.asyncio, "sleep", counted)
    engine = Engine(monkeypatch, BUSY, BUSY, BEGUN)
    assert engine.begin(**chosen)["sockets"] == BEGUN["sockets"]
    aborts = 0 if chosen else 2
    assert [(type(sent), sent.abort_all) for sent in engine.sent] == [(AbortReq, True)] * aborts
    assert ["manifest" in message for message in engine.asked] == [True, False, False]
    assert all(chosen.items() <= message.items() for message in engine.asked)
    assert not engine.manager.is_pause
    between = control_module.WAIT_POLL_S if chosen else scheduler_rpc.POLL_S
    assert waits == [between]  # after the first answer it tries again without one


@pytest.mark.parametrize("is_paused", [False, True])
def test_schedulers_are_told_whether_the_user_has_paused(
    monkeypatch: pytest.MonkeyPatch, is_paused: bool
) -> None:
    """They may hear of a continue_generation after the update that was asked for behind it: it
    comes by another socket."""
    engine = Engine(monkeypatch, BUSY, BEGUN)
    engine.manager.is_pause = is_paused
    engine.begin(in_flight="finish", paused=not is_paused)
    assert [asked["paused"] for asked in engine.asked] == [is_paused] * 2
    assert engine.manager.is_pause is is_paused


def test_an_engine_may_be_a_step_behind_its_last_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_module, "WAIT_POLL_S", 0.001)
    busy, done = ControlError("requests are running", 409), {"pending": True}

    def handle(engine: Engine) -> Any:
        return asyncio.run(engine.control.handle({"op": "kv_recalibrate"}))

    assert handle(Engine(monkeypatch, busy, busy, busy, done)) == done
    monkeypatch.setattr(control_module, "SETTLE_S", 0.01)
    late = Engine(monkeypatch, busy, done)
    late.refusal_s = 0.02
    assert handle(late) == done
    with pytest.raises(ControlError, match="requests are running"):
        handle(Engine(monkeypatch, busy))
    refused = Engine(monkeypatch, ControlError("requests are running", 400))
    with pytest.raises(ControlError):
        handle(refused)
    assert len(refused.asked) == 1


@pytest.mark.guarantee("no-bypass", fault="an update over TCP that was not asked for")
@pytest.mark.parametrize(
    ("message", "fault", "status"),
    [
        ({"in_flight": "wait"}, r"in_flight.*'wait'.*abort, finish", 400),
        # over TCP any user could write: a rank's own socket takes the engine's user alone
        ({"relay": True}, r"--fp8rl-listen any and a key", 403),
    ],
)
def test_what_is_refused_before_anything(
    monkeypatch: pytest.MonkeyPatch, message: dict[str, Any], fault: str, status: int
) -> None:
    engine = Engine(monkeypatch, BEGUN)
    assert (engine.refuses(fault, **message), engine.asked) == (status, [])
    assert engine.begin(relay=1)["sockets"] == BEGUN["sockets"], "control: one of this host"


@pytest.mark.parametrize("looks", [1, 2, 4])
def test_an_update_whose_trainer_is_gone_is_given_up(
    looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would abort requests, or hold new ones, for as long as others run, for nobody.

    It may have left before its turn came, at the first look.
    """
    engine = Engine(monkeypatch, BUSY)
    asked: list[None] = []

    async def is_gone() -> bool:
        asked.append(None)
        return len(asked) == looks

    begin = {"op": "begin", "version": 0, "fingerprint": "f"}
    with pytest.raises(ControlError, match=r"gone") as no:
        asyncio.run(engine.control.handle(begin, is_gone))
    assert no.value.status == 409 and not engine.manager.is_pause
    assert len(engine.sent) == max(looks - 2, 0), "none is aborted after it"
    assert (len(engine.asked) == 0) == (looks == 1), "nothing began"


def test_a_port_that_cannot_be_opened_is_told_before_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks that had begun would wait for a trainer that cannot come."""
    options = Fp8RLServerArgs(listen="any", key="secret")
    monkeypatch.setattr(control_module, "current_options", lambda: options)
    engine = Engine(monkeypatch, BEGUN, host="192.0.2.1")
    engine.refuses(r"cannot listen at 192.0.2.1.*--host", relay=True)
    assert engine.asked == []
    engine = Engine(monkeypatch, BEGUN, host="127.0.0.1")
    assert engine.begin(relay=True)["relay"]["port"] > 0, "control"


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
    assert engine.refuses(f"in_flight.*'{in_flight}'", in_flight=in_flight) == 503


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("ends", ["session", "refusal"])
def test_a_users_pause_meanwhile_is_kept(
    monkeypatch: pytest.MonkeyPatch, paused: bool, ends: str
) -> None:
    """SGLang's own ``pause_generation`` and ``continue_generation`` take effect after it."""
    engine = Engine(monkeypatch, BEGUN if ends == "session" else {"unknown": True})
    manager = engine.manager
    manager.is_pause = paused

    async def dispatch(message: Any) -> None:
        engine.sent.append(message)

    manager._async_dispatch_to_scheduler = dispatch

    def user() -> Coroutine[Any, Any, None]:
        if paused:
            return TokenizerManager.continue_generation(manager, ContinueGenerationReqInput())
        return TokenizerManager.pause_generation(manager, PauseGenerationReqInput(mode="in_place"))

    async def ask(message: dict[str, Any]) -> dict[str, Any]:
        calls.append(asyncio.create_task(user()))
        await asyncio.sleep(0.01)
        assert manager.is_pause and engine.sent == []
        return engine._answers[0]

    calls: list[asyncio.Task[None]] = []
    monkeypatch.setattr(engine.control._schedulers, "ask", ask)

    async def session() -> None:
        await engine.control.handle({"op": "begin", "version": 0})
        if ends == "session":
            await engine.control.handle({"op": "end"})
        await calls[0]

    asyncio.run(session())
    assert manager.is_pause is not paused
    assert len(engine.sent) == 1


# ---- what /health sees


class Silent:
    """A socket whose reply comes after some looks at it."""

    looks = 5

    def poll(self, timeout: int) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Control]:
    """A control channel whose schedulers are silent for longer than so many seconds."""

    def make(limit_s: float) -> Control:
        monkeypatch.setattr(scheduler_rpc, "ANSWER_TIMEOUT_S", limit_s)
        options = SimpleNamespace(**asdict(Fp8RLServerArgs()) | {"session_timeout_s": limit_s})
        monkeypatch.setattr(control_module, "current_options", lambda: options)
        monkeypatch.setattr(compat, "sock_send", lambda rpc, message: None, raising=False)
        reply = SimpleNamespace(message="{}")
        monkeypatch.setattr(compat, "sock_recv", lambda rpc: reply, raising=False)
        manager = SimpleNamespace(
            is_pause=False, is_pause_cond=asyncio.Condition(), last_receive_tstamp=0.0
        )
        return Control(manager, Silent(), SimpleNamespace())  # type: ignore[arg-type]

    return make


async def session(control: Control, sockets: Sequence[str] = ()) -> None:
    await control._manager.is_pause_cond.acquire()
    await control._watch(False, sockets)
    assert control._ended == {}


@pytest.mark.parametrize("op", ["layout", "session"])
@pytest.mark.parametrize("hangs", [False, True])
def test_health_sees_schedulers_that_hang(
    waiting: Callable[[float], Control], op: str, hangs: bool
) -> None:
    """It fails where nothing was received for 20 s: what hangs longer than it may is not hidden."""
    control = waiting(-1.0 if hangs else 60.0)
    asyncio.run(session(control) if op == "session" else control._schedulers.ask({"op": op}))
    assert (control._manager.last_receive_tstamp == 0.0) is hangs


@pytest.mark.parametrize("speaks", [False, True])
def test_health_sees_a_trainer_that_speaks_for_longer_than_it_may_be_silent(
    waiting: Callable[[float], Control], tmp_path: Path, speaks: bool
) -> None:
    socket_file = tmp_path / "rank0.sock"
    socket_file.touch()
    later = time.time() + (60.0 if speaks else 0.0)
    os.utime(socket_file, (later, later))
    control = waiting(-1.0)
    asyncio.run(session(control, [str(socket_file), str(tmp_path / "closed.sock")]))
    assert (control._manager.last_receive_tstamp > 0.0) is speaks


def test_schedulers_that_hang_do_not_hold_a_trainer_in_the_same_process_for_ever() -> None:
    async def handle(message: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(60)
        return {}

    loop = asyncio.new_event_loop()
    manager = SimpleNamespace(
        fp8rl_control=SimpleNamespace(handle=handle),
        event_loop=loop,
        signal_handler_class=lambda _: SimpleNamespace(
            sigterm_handler=None, running_phase_sigquit_handler=None
        ),
    )
    arguments = SimpleNamespace(quantization="fp8rl")
    engine = SimpleNamespace(loop=loop, tokenizer_manager=manager, server_args=arguments)
    with pytest.raises(ControlError, match="no answer") as raised:
        control_in_process.control_engine(engine, {"op": "end"}, 0.05)
    assert raised.value.status == 504
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def test_the_trainer_still_listens_when_a_long_wait_is_given_up() -> None:
    assert control_module.FINISH_TIMEOUT_S + control_module.DRAIN_TIMEOUT_S / 2 <= CONTROL_TIMEOUT_S


def test_the_status_during_a_session_asks_no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """They serve the session, and nothing else until it ends."""
    engine = Engine(monkeypatch, {"version": 3, "state": "serving"})
    engine.manager.is_pause = True  # as the fake schedulers want it

    async def ask(*, during: bool) -> dict[str, Any]:
        if during:
            engine.control._session = asyncio.create_task(asyncio.sleep(60))
        return await engine.control.handle({"op": "status"})

    before = asyncio.run(ask(during=False))
    assert (before["version"], before["state"]) == (3, "serving")
    assert set(before["logprobs"]) == {"raw"}
    assert asyncio.run(ask(during=True)) == {**before, "state": "updating"}
    assert engine.asked == [{"op": "status"}]


# ---- a release of memory


class Release:
    """A release by the main process, of an engine that is busy for some looks.

    ``paused`` is the schedulers' own pause, which a pause that aborts requests has not.
    """

    paused = False

    def __init__(self, patch: pytest.MonkeyPatch, busy: int) -> None:
        self.released = 0
        self.engine = Engine(patch, BEGUN)
        self.manager = self.engine.manager
        self.looks: list[bool] = []
        """Whether new requests were kept back, at each look."""
        patch.setattr(control_module, "WAIT_POLL_S", 0.01)

        async def ask(message: dict[str, Any]) -> dict[str, Any]:
            assert message == {"op": "idle"}
            self.looks.append(self.manager.is_pause_cond.locked())
            await asyncio.sleep(0)
            return {"idle": len(self.looks) > busy, "paused": self.paused}

        patch.setattr(self.engine.control._schedulers, "ask", ask)

    async def stock(self, manager: Any, *args: Any) -> str:
        assert self.manager.is_pause_cond.locked()
        self.released += 1
        return "released"

    async def release(self) -> Any:
        return await release_when_idle(self.stock, self.manager, "request")


@pytest.mark.parametrize("paused", [False, True])
def test_a_release_waits_for_requests_and_keeps_new_ones_back(
    monkeypatch: pytest.MonkeyPatch, paused: bool
) -> None:
    """Also for what a pause aborted: verl pauses and releases at once, and the overlapped
    scheduler is a step behind its reply."""
    release = Release(monkeypatch, busy=2)
    release.manager.is_pause = paused
    assert asyncio.run(release.release()) == "released"
    assert release.looks == [True] * 3
    assert not release.manager.is_pause_cond.locked()
    assert release.manager.is_pause is paused


@pytest.mark.parametrize(("paused", "why"), [(True, "paused"), (False, "still running")])
def test_a_release_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch, paused: bool, why: str
) -> None:
    release = Release(monkeypatch, busy=10**9)
    release.manager.is_pause = release.paused = paused
    monkeypatch.setattr(control_module, "DRAIN_TIMEOUT_S", 0.05)
    with pytest.raises(ControlError, match=why):
        asyncio.run(release.release())
    assert release.released == 0
    assert not release.manager.is_pause_cond.locked()


@pytest.mark.parametrize("quantization", ["fp8rl", "fp8"])
def test_a_release_before_the_first_control_message(
    monkeypatch: pytest.MonkeyPatch, quantization: str
) -> None:
    """Of an ``sgl.Engine``, whose schedulers would put it off for ever while it is paused."""
    released: list[None] = []

    async def stock(manager: Any) -> None:
        released.append(None)

    async def ask(schedulers: SchedulerRpc, message: dict[str, Any]) -> dict[str, Any]:
        assert message == {"op": "idle"}
        return {"idle": False, "paused": True}

    monkeypatch.setattr(SchedulerRpc, "ask", ask)
    monkeypatch.setattr(control_in_process.compat, "check_live", lambda *_: None)
    loop = asyncio.new_event_loop()
    engine = SimpleNamespace(
        server_args=SimpleNamespace(quantization=quantization),
        tokenizer_manager=SimpleNamespace(is_pause=True, is_pause_cond=asyncio.Condition()),
        send_to_rpc=None,
    )

    def release(engine: Any) -> None:
        loop.run_until_complete(release_when_idle(stock, engine.tokenizer_manager))

    if quantization == "fp8rl":
        with pytest.raises(ControlError, match="generation is paused"):
            control_in_process.release_of_engine(release, engine)
        assert not released
    else:  # SGLang's own, which ends itself
        control_in_process.release_of_engine(release, engine)
        assert released
    loop.close()


def test_what_a_caller_gave_up_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Release(monkeypatch, busy=20)

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(release.release(), 0.05)
        async with release.engine.control.lock:  # the look that was under way has ended
            pass

    asyncio.run(give_up())
    assert release.looks and release.released == 0


def test_a_resume_comes_after_a_release_that_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Release(monkeypatch, busy=2)
    before: list[int] = []

    async def resume(manager: Any) -> None:
        before.append(release.released)

    async def both() -> None:
        asked = asyncio.create_task(release.release())
        while not release.looks:
            await asyncio.sleep(0)
        await resume_in_turn(resume, release.manager)
        await asked

    asyncio.run(both())
    assert before == [1]
