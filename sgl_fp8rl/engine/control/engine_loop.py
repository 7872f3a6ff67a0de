"""Runs the event loop of an ``sgl.Engine`` while calls of this process need it, from any thread."""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from sgl_fp8rl.engine.control.scheduler_rpc import ControlError

T = TypeVar("T")

POLL_S = 0.002
"""Between two looks whether another thread still runs the loop."""
WAKE_S = 0.2
IN_THE_WAY = (
    "the engine's event loop is the one that runs in this thread, as in a notebook or under "
    "asyncio.run, and would wait for itself; call from another thread: await asyncio.to_thread(...)"
)
CLOSED = (
    "the event loop on which this engine was first called is closed, and SGLang reads its replies "
    "there alone; make the engine's first call outside of asyncio.run, or all calls inside of one"
)


class EngineLoop:
    """Runs an engine's loop in a thread as long as calls are in flight, and not a moment longer:
    SGLang's own calls (``generate``, ``flush_cache``) run it in the thread that makes them.

    Args:
        loop: the engine's.
        manager: its tokenizer manager, which may have been called first on another loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, manager: Any) -> None:
        self._loop, self._manager = loop, manager
        self._lock = threading.Lock()
        self._calls: set[Future[Any]] = set()
        """In flight."""
        self._runner: _Runner | None = None
        self._ended_by: BaseException | None = None
        self._has_signals = False

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop, and wait for it.

        Returns:
            its result.

        Raises:
            ControlError: the loop runs in this very thread, or is closed; or the engine was shut
                down. Else what the coroutine raises.
        """
        loop: asyncio.AbstractEventLoop = self._manager.event_loop or self._loop
        is_inside = _running() is loop
        if is_inside:
            return _run_inside(loop, coroutine)
        self._keep_signals()
        call: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []
        self._enter(loop, call)
        try:
            if not call.done():
                loop.call_soon_threadsafe(_start, loop, coroutine, call, tasks)
            # signals that another thread was given are handled here, when this one wakes
            while not wait([call], WAKE_S).done:
                pass
            return call.result()
        except BaseException:
            if not call.done():  # Ctrl-C: SGLang aborts what is cancelled
                loop.call_soon_threadsafe(_cancel, tasks)
                call.exception()
            raise
        finally:
            self._leave(call)
            if not tasks:
                coroutine.close()
            del call  # an error's traceback refers to here: a cycle would keep what its frames hold

    def end(self, why: BaseException) -> None:
        """Have all calls fail, those in flight and later ones: the engine is gone."""
        self._ended_by = why
        for call in list(self._calls):
            with suppress(InvalidStateError):  # it has just ended
                call.set_exception(why)

    def _enter(self, loop: asyncio.AbstractEventLoop, call: Future[Any]) -> None:
        with self._lock:
            self._calls.add(call)
            if loop.is_closed():
                self.end(ControlError(CLOSED))
            if self._ended_by is not None:
                self.end(self._ended_by)
            elif self._runner is None:
                self._runner = _Runner(loop, self.end)
                self._runner.start()

    def _leave(self, call: Future[Any]) -> None:
        with self._lock:
            self._calls.discard(call)
            if not self._calls and self._runner is not None:
                runner, self._runner = self._runner, None
                runner.stop()

    def _keep_signals(self) -> None:
        """Set SGLang's handlers, as its own first call does in the main thread: ours makes the
        first call in another one. And uvloop calls none while it runs in another one."""
        is_main = threading.current_thread() is threading.main_thread()
        if self._has_signals or not is_main or _running() is not None:
            return
        self._has_signals = True
        first_loop = self._manager.event_loop
        handlers = self._manager.signal_handler_class(self._manager)
        for number, handle in (
            (signal.SIGTERM, handlers.sigterm_handler),
            (signal.SIGQUIT, handlers.running_phase_sigquit_handler),
        ):
            known = signal.getsignal(number)
            # SGLang has called before: what was set since is its user's
            if first_loop is None or getattr(known, "__self__", None) is first_loop:
                signal.signal(number, handle)


class _Runner(threading.Thread):
    """Runs a loop until it is stopped, whenever nothing else runs it.

    Args:
        end: called with what ends the loop.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, end: Callable[[BaseException], None]
    ) -> None:
        super().__init__(name="fp8rl-engine-loop", daemon=True)
        self._loop, self._end, self._is_over = loop, end, threading.Event()

    def run(self) -> None:
        while not self._is_over.is_set():
            if self._loop.is_closed():
                return self._end(ControlError(CLOSED))
            try:
                if not self._loop.is_running():
                    self._loop.run_forever()
            except RuntimeError:  # a call of SGLang's own came first
                pass
            except SystemExit as ending:  # SGLang ends the process
                return self._end(ending)
            self._is_over.wait(POLL_S)
        return None

    def stop(self) -> None:
        """End the thread, and wait until it has left the loop."""
        self._is_over.set()
        while self.is_alive():  # whoever else runs the loop may take the message
            with suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(self._stop_here)
            self.join(POLL_S)

    def _stop_here(self) -> None:
        if threading.current_thread() is self:
            self._loop.stop()


def _running() -> asyncio.AbstractEventLoop | None:
    """The loop that runs in this thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _run_inside(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run it on the loop that runs this very code, which nest_asyncio allows."""
    task = loop.create_task(coroutine)
    try:
        return loop.run_until_complete(task)
    except RuntimeError:
        if task.done():
            raise
        task.cancel()
        raise ControlError(IN_THE_WAY) from None


def _start(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, T],
    call: Future[T],
    tasks: list[asyncio.Task[T]],
) -> None:
    if not call.done():
        tasks.append(loop.create_task(coroutine))
        tasks[0].add_done_callback(partial(_settle, call))


def _cancel(tasks: list[asyncio.Task[T]]) -> None:
    for task in tasks:
        task.cancel()


def _settle(call: Future[T], task: asyncio.Task[T]) -> None:
    with suppress(InvalidStateError):  # it was ended before
        if task.cancelled():
            call.set_exception(ControlError(CLOSED))
        elif error := task.exception():
            call.set_exception(error)
        else:
            call.set_result(task.result())
