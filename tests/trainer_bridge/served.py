"""Fake engines behind HTTP, for trainers in processes of their own, which may be killed."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from sgl_fp8rl.protocol.states import State
from tests.sgl_fp8rl.receiver import toy
from tests.sgl_fp8rl.receiver.fake_engine import FakeEngine
from tests.trainer_bridge.test_engine_client import Server
from tests.trainer_bridge.test_update import holds
from trainer_bridge.engines.engine_client import EngineError


@contextmanager
def served(engines: Sequence[FakeEngine]) -> Iterator[list[str]]:
    """The addresses of fake engines, for trainers in processes of their own."""

    def answer(engine: FakeEngine, message: Any) -> tuple[int, bytes]:
        try:
            return 200, json.dumps(engine.control(message)).encode()
        except EngineError as error:
            return error.status or 500, json.dumps({"error": str(error)}).encode()

    with ExitStack() as stack:
        addresses = []
        for engine in engines:
            server = stack.enter_context(Server())
            server.answer = partial(answer, engine)
            addresses.append(server.address)
        yield addresses


def left(engine: FakeEngine) -> str:
    """What an engine serves: the version whose checkpoint all ranks hold, or that it is
    quarantined."""
    ((state, policy),) = {(weights.state, weights.policy) for weights in engine.ranks}
    if state is State.QUARANTINED:
        return "quarantined"
    assert state is State.SERVING and holds(engine, toy.checkpoint(policy.version)), state
    return f"{policy.version}"
