"""Control messages: from the HTTP body, through the main process, to the scheduler."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import sglang  # noqa: F401  (its platform must be resolved before our modules are loaded)

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.control import control as control_module
from sgl_fp8rl.engine.control import control_route, host
from sgl_fp8rl.engine.control import scheduler as scheduler_module
from sgl_fp8rl.engine.control.attached import attach
from sgl_fp8rl.engine.control.control import Control
from sgl_fp8rl.engine.control.scheduler_rpc import ControlError
from sgl_fp8rl.protocol.manifest import describe
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.receiver import update_steps
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from sgl_fp8rl.receiver.rank_server import Outcome
from tests.fuzz.decoder import Decoder, to_json
from tests.fuzz.memory import SHAPES, engine
from tests.sgl_fp8rl.receiver import toy

MANIFEST = describe(
    ((name, toy.torch.ones(shape, dtype=toy.BF16)) for name, shape in SHAPES.items()), 256
)
BEGIN = {
    "op": "begin",
    "run": toy.RUN,
    "version": 1,
    "fingerprint": MANIFEST.fingerprint,
    "in_flight": "abort",
    "transaction": "a transaction",
    "retry": False,
    "engines": 2,
}
OPS = "layout status layers tensors digest code_sums kv end"
SEEDS = (
    *({"op": op} for op in OPS.split()),
    *(BEGIN, {**BEGIN, "manifest": MANIFEST.to_json()}),
    {"op": "export_layout", "manifest": MANIFEST.to_json()},
)


class CrashError(Exception):
    """The scheduler's hook raised, which ends the server. No decoder documents it."""


class Rpc:
    """The socket between main process and scheduler; messages are answered as they are sent."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.replies: list[Any] = []

    def poll(self, timeout: int) -> bool:
        return bool(self.replies)

    def send(self, request: Any) -> None:
        try:
            answer = scheduler_module.handle_rpc(None, self._scheduler, request)
        except Exception as error:
            raise CrashError(repr(error)[:300]) from error
        self.replies.append(answer)


async def handle(weights: EngineWeights, data: bytes) -> None:
    model: Any = weights.model
    scheduler = SimpleNamespace(
        tp_group=SimpleNamespace(cpu_group=None),
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)),
        is_fully_idle=lambda: True,
        enable_hierarchical_cache=False,
        flush_cache=lambda empty_cache: True,
        waiting_queue=[],
        _engine_paused=False,
    )
    rpc = Rpc(scheduler)
    scheduler.ipc_channels = SimpleNamespace(recv_from_rpc=rpc.replies)
    manager: Any = SimpleNamespace(
        is_pause=False,
        is_pause_cond=asyncio.Condition(),
        auto_create_handle_loop=lambda: None,
        _update_weight_version_if_provided=lambda version: None,
    )
    socket: Any = rpc
    control = Control(manager, socket, SimpleNamespace())

    async def body() -> bytes:
        return data

    try:
        message = await control_route._json(SimpleNamespace(body=body))
        reply = await control.handle(message)
        assert isinstance(reply, dict)
        if "sockets" in reply:
            await control.handle({"op": "end"})
    finally:
        assert not manager.is_pause, "the engine stays paused"


def decode(loop: asyncio.AbstractEventLoop, weights: EngineWeights, data: bytes) -> None:
    weights.policy, weights.session = Policy(toy.RUN, 0), None
    loop.run_until_complete(handle(weights, data))


@contextmanager
def decoders() -> Iterator[list[Decoder]]:
    weights = engine()
    attach(weights.model, weights)
    outcome = Outcome(True, "", True), None
    answer = partial(SimpleNamespace, success=True)
    stub = SimpleNamespace(path="rank0.sock", close=lambda: None)
    loop = asyncio.new_event_loop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "gather", lambda value, group: [value])
        patch.setattr(update_steps, "RankSocket", lambda rank: stub)
        patch.setattr(update_steps, "serve", lambda *_: outcome)
        patch.setattr(host.dist, "get_rank", lambda group: 0)
        patch.setitem(vars(compat), "RpcReqInput", SimpleNamespace)
        patch.setitem(vars(compat), "RpcReqOutput", answer)
        patch.setitem(vars(compat), "sock_send", send)
        patch.setitem(vars(compat), "sock_recv", lambda rpc: rpc.replies.pop(0))
        patch.setattr(control_module, "SETTLE_S", -1.0)  # what is refused as busy stays so
        for seed in SEEDS:  # SGLang's modules are imported now, not while memory is traced
            with suppress(ControlError):
                decode(loop, weights, to_json(seed))
        yield [Decoder("control", SEEDS, partial(decode, loop, weights), (ControlError,))]
    loop.close()


def send(channel: Any, message: Any) -> None:
    """To the scheduler, or from it, where the channel is what waits for its answers."""
    if isinstance(channel, list):
        json.loads(message.message)
        channel.append(message)
    else:
        channel.send(message)
