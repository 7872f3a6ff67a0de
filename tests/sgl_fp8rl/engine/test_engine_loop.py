"""Calls of an engine's loop from several threads, on the loops that engines have."""

import asyncio
import gc
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from sgl_fp8rl.engine.control.engine_loop import EngineLoop
from sgl_fp8rl.engine.control.scheduler_rpc import ControlError

pytestmark = pytest.mark.timeout(120)

WAIT_S = 60.0


@pytest.fixture(params=[asyncio.SelectorEventLoop, uvloop.new_event_loop])
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGQUIT)}
    loop = request.param()
    yield loop
    if not loop.is_closed():
        loop.close()
    for number, handler in before.items():
        signal.signal(number, handler)


class Manager:
    """As much of a tokenizer manager as the loop needs."""

    def __init__(self) -> None:
        self.event_loop: asyncio.AbstractEventLoop | None = None
        self.signals: list[int] = []

    def signal_handler_class(self, manager: Any) -> Any:
        def note(number: int, _: Any) -> None:
            self.signals.append(number)

        return SimpleNamespace(sigterm_handler=note, running_phase_sigquit_handler=note)


async def answer(value: int, wait_s: float = 0.0) -> int:
    await asyncio.sleep(wait_s)
    return value


async def fail() -> None:
    raise KeyError("x")


def test_threads_share_the_loop_and_leave_it_at_rest(loop: asyncio.AbstractEventLoop) -> None:
    """Between calls it does not run, and stock calls may run it, here and in another thread."""
    shared = EngineLoop(loop, Manager())
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            calls = [pool.submit(shared.run, answer(n, n * 1e-3)) for n in range(8)]
            assert shared.run(answer(9)) == 9
            assert [call.result(WAIT_S) for call in calls] == list(range(8))
            assert not loop.is_running()
            assert loop.run_until_complete(answer(1)) == 1
            assert pool.submit(loop.run_until_complete, answer(2)).result(WAIT_S) == 2
    assert "fp8rl-engine-loop" not in {thread.name for thread in threading.enumerate()}


def test_a_call_beside_stock_calls(loop: asyncio.AbstractEventLoop) -> None:
    """It goes on where one of these ends that ran the loop."""
    shared = EngineLoop(loop, Manager())
    with ThreadPoolExecutor(2) as pool:

        async def stock() -> Future[int]:
            ours = pool.submit(shared.run, answer(5, 0.02))
            await asyncio.sleep(0.01)
            return ours

        for _ in range(20):
            assert loop.run_until_complete(stock()).result(WAIT_S) == 5
            assert not loop.is_running()


def test_a_loop_of_the_caller(loop: asyncio.AbstractEventLoop) -> None:
    """Another one than the engine's is blocked, as by any call; the engine's own would wait for
    itself, and other threads may call."""
    shared = EngineLoop(loop, Manager())

    async def cell() -> int:
        return shared.run(answer(1)) + await asyncio.to_thread(shared.run, answer(2))

    assert asyncio.run(cell()) == 3

    async def on_its_loop() -> int:
        with pytest.raises(ControlError, match=r"await asyncio\.to_thread"):
            shared.run(answer(1))
        return await asyncio.to_thread(shared.run, answer(2))

    assert loop.run_until_complete(on_its_loop()) == 2
    assert shared.run(answer(4)) == 4


def test_where_loops_may_be_nested() -> None:
    """As in notebooks, for SGLang's own calls; in another process, since it changes asyncio."""
    nested = multiprocessing.get_context("fork").Process(target=call_inside)
    nested.start()
    nested.join()
    assert nested.exitcode == 0


def call_inside() -> None:
    import nest_asyncio

    loop = asyncio.SelectorEventLoop()
    nest_asyncio.apply(loop)
    shared = EngineLoop(loop, Manager())

    async def cell() -> int:
        with pytest.raises(KeyError):
            shared.run(fail())
        return shared.run(answer(1))

    assert loop.run_until_complete(cell()) == 1


def test_an_error_keeps_nothing(loop: asyncio.AbstractEventLoop) -> None:
    shared = EngineLoop(loop, Manager())

    class Weights:
        pass

    async def fail_with(weights: Weights) -> None:
        raise KeyError("x")

    def update() -> "weakref.ref[Weights]":
        weights = Weights()
        with pytest.raises(KeyError):
            shared.run(fail_with(weights))
        return weakref.ref(weights)

    found = update()
    gc.collect()
    assert found() is None


def test_the_first_loop_of_the_engine_counts(loop: asyncio.AbstractEventLoop) -> None:
    """SGLang reads replies on the loop of its first call; once that is closed, as ``asyncio.run``
    closes its own, also under a call, nobody does."""
    manager = Manager()
    shared = EngineLoop(asyncio.new_event_loop(), manager)

    async def where() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    with ThreadPoolExecutor(1) as pool:

        async def first() -> Future[int]:
            manager.event_loop = asyncio.get_running_loop()
            assert await asyncio.to_thread(shared.run, where()) is manager.event_loop
            under_way = pool.submit(shared.run, answer(1, WAIT_S))
            await asyncio.sleep(0.05)
            return under_way

        under_way = asyncio.run(first())
        for _ in range(2):
            with pytest.raises(ControlError, match="is closed"):
                under_way.result(WAIT_S)
            with pytest.raises(ControlError, match="is closed"):
                shared.run(answer(1))
    shared._loop.close()


def test_signals_reach_sglangs_handlers(loop: asyncio.AbstractEventLoop) -> None:
    """Though the loop runs in another thread than the one that handles signals."""
    manager = Manager()
    shared = EngineLoop(loop, manager)

    async def terminated() -> list[int]:
        os.kill(os.getpid(), signal.SIGTERM)
        while not manager.signals:
            await asyncio.sleep(0.001)
        return manager.signals

    assert shared.run(terminated()) == [signal.SIGTERM]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # its user's own, from then on
    shared.run(answer(1))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_signals_after_a_stock_call(loop: asyncio.AbstractEventLoop) -> None:
    """Which has set its own handlers, and uvloop calls them in the main thread alone. What a user
    has set since stays."""
    manager, stock = Manager(), list[int]()

    async def first() -> None:
        manager.event_loop = loop
        for number in (signal.SIGTERM, signal.SIGQUIT):
            loop.add_signal_handler(number, stock.append, int(number))

    loop.run_until_complete(first())
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)

    async def terminated() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        while not manager.signals + stock:
            await asyncio.sleep(0.001)

    EngineLoop(loop, manager).run(terminated())
    assert signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN


def test_ctrl_c_cancels_what_it_waits_for(loop: asyncio.AbstractEventLoop) -> None:
    ended: list[str] = []

    async def long() -> None:
        try:
            threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT]).start()
            await asyncio.sleep(WAIT_S)
        finally:
            ended.append("requests are aborted")

    with pytest.raises(KeyboardInterrupt):
        EngineLoop(loop, Manager()).run(long())
    assert ended and not loop.is_running()


@pytest.mark.parametrize("why", [ControlError("the engine was shut down"), SystemExit(0)])
def test_an_engine_that_ends(loop: asyncio.AbstractEventLoop, why: BaseException) -> None:
    """By its shutdown, or by SGLang, which ends the process from a task of its own."""
    shared = EngineLoop(loop, Manager())

    async def end() -> None:
        await asyncio.sleep(0.02)
        raise why

    async def begin() -> None:
        if isinstance(why, SystemExit):
            asyncio.get_running_loop().create_task(end())
        else:
            threading.Timer(0.02, shared.end, [why]).start()
        await asyncio.sleep(WAIT_S)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(shared.run, answer(1, WAIT_S))
        while not shared._calls:
            time.sleep(0.001)
        for call in (lambda: shared.run(begin()), other.result, lambda: shared.run(answer(1))):
            with pytest.raises(type(why)):
                call()
