"""What a trainer does with an ``sgl.Engine`` of its own process; runs there (``harness.py``).

Each function asserts what it is about, in the process where it happens, and returns nothing.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trainer_bridge
from tests.engine import models
from trainer_bridge import Rollout, rollout
from trainer_bridge.engines.engine_client import EngineError

LONG = {"temperature": 1.0, "max_new_tokens": 240, "ignore_eos": True}
SHORT = {**LONG, "max_new_tokens": 4}
PROMPTS = [[1, 2, 3], [4, 5]]
THREADS = 3
WAIT_S = 100.0


def all_ways(engine: Any, checkpoint: Path) -> None:
    """Everything, on one engine, whose last step is its shutdown."""
    tensors = dict(models.named_tensors(checkpoint))
    for call in (update_beside_rollouts, signals, interrupts):
        call(engine, tensors)
        stock_calls(engine)
    shutdown(engine)


def stock_calls(engine: Any) -> None:
    """SGLang's own, which run the loop themselves, in this thread and in another."""

    def call() -> None:
        reply = engine.generate(input_ids=[1, 2], sampling_params=SHORT)
        assert len(reply["output_ids"]) == 4
        deadline = time.monotonic() + WAIT_S
        while not engine.flush_cache().success:  # a reply is there before its request has left
            assert time.monotonic() < deadline

    call()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result(WAIT_S)


def version_of(engine: Any) -> int:
    return int(trainer_bridge.connect(engine).control({"op": "status"})["version"])


@contextmanager
def sampled_by_threads(engine: Any) -> Iterator[list[Rollout]]:
    """Meanwhile, threads sample again and again; what they got, after the end."""
    over, found = threading.Event(), list[Rollout]()

    def sample() -> None:
        while not over.is_set():
            found.append(rollout(engine, PROMPTS, LONG))

    with ThreadPoolExecutor(THREADS) as pool:
        samples = [pool.submit(sample) for _ in range(THREADS)]
        try:
            await_requests(engine, samples)
            yield found
        finally:
            over.set()
        for each in samples:
            each.result(WAIT_S)


def await_requests(engine: Any, calls: list[Future[None]]) -> None:
    """Wait until some have tokens."""
    deadline = time.monotonic() + WAIT_S
    while not any(state.output_ids for state in [*engine.tokenizer_manager.rid_to_state.values()]):
        assert time.monotonic() < deadline
        for call in calls:
            assert not call.done() or call.result() is None
        time.sleep(0.002)


def update_beside_rollouts(engine: Any, tensors: dict[str, Any]) -> None:
    for in_flight in ("abort", "finish", "retract"):
        old = version_of(engine)
        with sampled_by_threads(engine) as found:
            trainer_bridge.update(tensors, engine, version=old + 1, in_flight=in_flight)
        assert version_of(engine) == old + 1
        versions = [set(row) for each in found for row in each.versions]
        reasons = [reason for each in found for reason in each.finish_reasons]
        assert set().union(*versions) <= {old, old + 1}
        assert {old} in versions or {old, old + 1} in versions
        assert ({old, old + 1} in versions) == (in_flight == "retract")
        assert ("abort" in reasons) == (in_flight == "abort")
        assert set(reasons) <= {"abort", "length"}


def signals(engine: Any, _: dict[str, Any]) -> None:
    """SGLang's handler of SIGTERM is called while a call of ours runs."""
    manager, called = engine.tokenizer_manager, threading.Event()
    kind = type(manager)
    # a manager that would not end the process
    noted = property(lambda _: False, lambda *_: called.set())
    manager.__class__ = type("Noting", (kind,), {"gracefully_exit": noted})
    with ThreadPoolExecutor(1) as pool:

        def terminate() -> None:
            await_requests(engine, [])
            os.kill(os.getpid(), signal.SIGTERM)
            assert called.wait(WAIT_S)

        terminated = pool.submit(terminate)
        rollout(engine, PROMPTS, LONG)
        terminated.result(WAIT_S)
    manager.__class__ = kind


def interrupts(engine: Any, _: dict[str, Any]) -> None:
    """Ctrl-C ends a rollout, and its requests with it."""
    with ThreadPoolExecutor(1) as pool:

        def interrupt() -> None:
            await_requests(engine, [])
            os.kill(os.getpid(), signal.SIGINT)

        interrupted = pool.submit(interrupt)
        try:
            rollout(engine, PROMPTS, {**LONG, "max_new_tokens": 900})
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("it was not interrupted")
        interrupted.result(WAIT_S)
    assert rollout(engine, PROMPTS, SHORT).finish_reasons == ["length"] * 2


def shutdown(engine: Any) -> None:
    """What is in flight in another thread ends, and says why."""
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(rollout, engine, PROMPTS, {**LONG, "max_new_tokens": 900})
        await_requests(engine, [])
        engine.shutdown()
        for ended in (call, pool.submit(version_of, engine)):
            error = ended.exception(WAIT_S)
            assert isinstance(error, EngineError) and "was shut down" in str(error)
