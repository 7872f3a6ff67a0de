"""An engine without SGLang: real update steps and real sockets, one thread for each rank.

``FakeEngine`` is an ``EngineClient``; it answers control messages as SGLang's main process does.
"""

import queue
import threading
from dataclasses import replace
from typing import Any

from sgl_fp8rl.protocol.place import here
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver import update_steps
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from sgl_fp8rl.receiver.relay.memory import RelayMemory
from sgl_fp8rl.receiver.relay.relay import Relay
from tests.sgl_fp8rl.receiver.fake_host import Exchange, FakeHost
from trainer_bridge.engines.engine_client import EngineError

TOKEN = "the session's token"
JOIN_S = 60.0


class FakeEngine:
    """Ranks of one engine, with the control messages that an update needs."""

    def __init__(
        self, ranks: list[EngineWeights], bucket_bytes: int = 1 << 20, snapshot_bytes: int = 0
    ) -> None:
        self.ranks, self.bucket_bytes = ranks, bucket_bytes
        self.silence_s = 30.0
        """Of the engine's options."""
        self._set_options()
        self.place = here()
        self.visible_gpus: list[str] = []
        self.memories = RelayMemory(bucket_bytes, snapshot_bytes)
        self.relays: list[Relay] = []
        self.tied: list[int] | None = None
        """Shape of the embedding, where the model is tied."""
        self.told: dict[str, Any] = {}
        """What else its layout says."""
        self.dead: tuple[str, ...] = ()
        """Control messages that do not reach it."""
        self.lost: list[str] = []
        """Control messages whose next answer gets lost."""
        self.ops: list[str] = []
        self.ended: list[dict[str, Any]] = []
        """What each rank said at the end of the last session."""
        self.faults: list[BaseException] = []
        """What update steps let through: it would have ended the server."""
        self._threads: list[threading.Thread] = []

    def control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
        if message["op"] in self.dead:
            raise EngineError("the engine cannot be reached", None)
        reply = self._answer(message)
        if message["op"] in self.lost:
            self.lost.remove(message["op"])
            raise EngineError("the connection was cut", None)
        return reply

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        self.ops.append(message["op"])
        table = self.ranks[0].table
        if message["op"] == "layout":
            return {
                "dtype": "bfloat16",
                "bucket_bytes": self.bucket_bytes,
                "version": self.ranks[0].policy.version,
                "state": self.ranks[0].state.value,
                "gpus": [],
                "visible_gpus": self.visible_gpus,
                "place": self.place,
                **(table.names if table else {"fp32": None, "formats": {}}),
                "skipped": sorted(table.skipped) if table else [],
                "tied": self.tied,
                **self.told,
            }
        if message["op"] == "tensors":
            shapes = None if table is None else {n: list(s) for n, s in table.sources.items()}
            return {"shapes": shapes}
        if message["op"] == "status":
            policy = self.ranks[0].policy
            state = self.ranks[0].state.value
            status = {"run": policy.run, "version": policy.version, "state": state}
            return {**status, "logprobs": {"raw": False}}
        if message["op"] == "begin":
            return self._begin(message)
        if message["op"] != "end":
            raise EngineError(f"control message {message['op']} is unknown", 400)
        self.join()
        return {"ended": True}

    def join(self, threads: list[threading.Thread] | None = None) -> None:
        """Wait for the end of the session, or of these."""
        for thread in self._threads if threads is None else threads:
            thread.join(JOIN_S)
            assert not thread.is_alive(), "the session does not end"
        assert not self.faults, f"the update let {self.faults[0]!r} through"

    def _set_options(self) -> None:
        for weights in self.ranks:
            if weights.options.session_timeout_s != self.silence_s:
                weights.options = replace(weights.options, session_timeout_s=self.silence_s)

    def sampled(self) -> list[int]:
        """The policy versions of a reply's tokens, which a request would get now.

        Raises:
            EngineError: the engine is quarantined.
        """
        if self.ranks[0].state is not State.SERVING:
            raise EngineError("the engine is quarantined", 503)
        return [self.ranks[0].policy.version] * 3

    def _begin(self, message: dict[str, Any]) -> dict[str, Any]:
        exchange, told = Exchange(len(self.ranks)), queue.SimpleQueue[dict[str, Any]]()
        ended: list[dict[str, Any]] = []

        def run(rank: int, weights: EngineWeights) -> None:
            try:
                reply = update_steps.run(
                    FakeHost(rank, exchange, told.put), weights, {**message, "token": TOKEN}
                )
            except BaseException as fault:
                self.faults.append(fault)
                exchange.abort()
                told.put({"error": repr(fault)})
                raise
            ended.append(reply)
            if rank == 0:
                told.put(reply)

        self._set_options()
        threads = [
            threading.Thread(target=run, args=each, daemon=True) for each in enumerate(self.ranks)
        ]
        for thread in threads:
            thread.start()
        reply = told.get(timeout=JOIN_S)
        if "sockets" not in reply:  # a session of another trainer may be under way
            self.join(threads)
            if "error" in reply:
                raise EngineError(reply["error"], 400)
            return reply
        self.ended, self._threads = ended, threads
        if not message.get("relay"):
            return {"token": TOKEN, **reply}
        relay = Relay("127.0.0.1", self.silence_s, self.memories)
        relay.start(reply["sockets"], TOKEN)
        self.relays.append(relay)
        return {"token": TOKEN, "relay": {"host": "127.0.0.1", "port": relay.port}}
