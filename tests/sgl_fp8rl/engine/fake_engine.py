"""An engine without SGLang: real sessions and real sockets, one thread for each rank.

``FakeEngine`` is an ``EngineClient``; it does around a session what the scheduler hooks do.
"""

import threading
from typing import Any

from sgl_fp8rl.protocol.manifest import Manifest, ManifestError
from sgl_fp8rl.protocol.place import here
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.weight_update.engine_weights import EngineWeights
from sgl_fp8rl.weight_update.rank_server import Outcome, RankSocket, committed, reply, serve
from sgl_fp8rl.weight_update.relay import Relay
from sgl_fp8rl.weight_update.relay_memory import RelayMemory
from sgl_fp8rl.weight_update.session import Session
from trainer_bridge.engine_client import EngineError

TOKEN = "the session's token"
JOIN_S = 60.0


class RankThread:
    """Serves one session on one rank, as the scheduler's main thread does."""

    def __init__(
        self, session: Session, rank: int = 0, silence_s: float = 30.0, is_one_of: int = 1
    ) -> None:
        self.socket = RankSocket(rank)
        self.path = str(self.socket.path)
        self.peer: Any = None
        self._session, self._silence_s, self._is_one_of = session, silence_s, is_one_of
        self._outcome: Outcome | None = None
        self.fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome, self.peer = serve(
                self.socket, self._session, TOKEN, self._silence_s, self._is_one_of
            )
        except BaseException as fault:  # kept for the test: it would have ended the server
            self.fault = fault
            raise
        finally:
            self.socket.close()

    def outcome(self) -> Outcome:
        """How the session ended.

        Raises:
            AssertionError: it did not end, or let an exception through.
        """
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive(), "serve() hangs"
        assert self.fault is None, f"serve() let {self.fault!r} through"
        assert self._outcome is not None
        return self._outcome


class FakeEngine:
    """Ranks of one engine, with the control messages that an update needs."""

    def __init__(
        self, ranks: list[EngineWeights], bucket_bytes: int = 1 << 20, image_bytes: int = 0
    ) -> None:
        self.ranks, self.bucket_bytes = ranks, bucket_bytes
        self.silence_s = 30.0
        self.place = here()
        self.visible_gpus: list[str] = []
        self.memories = RelayMemory(bucket_bytes, image_bytes)
        self.relays: list[Relay] = []
        self.tied: list[int] | None = None
        """Shape of the embedding, where the model is tied."""
        self.ops: list[str] = []
        self.outcomes: list[Outcome] = []
        self._watch: threading.Thread | None = None

    def control(self, message: dict[str, Any], timeout_s: float = 9.0) -> dict[str, Any]:
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
            }
        if message["op"] == "tensors":
            shapes = None if table is None else {n: list(s) for n, s in table.sources.items()}
            return {"shapes": shapes}
        if message["op"] == "status":
            policy = self.ranks[0].policy
            state = self.ranks[0].state.value
            return {"run": policy.run, "version": policy.version, "state": state}
        if message["op"] == "begin":
            return self._begin(message)
        if message["op"] != "end":
            raise EngineError(f"control message {message['op']} is unknown", 400)
        assert self._watch is not None
        self._watch.join(JOIN_S)
        assert not self._watch.is_alive(), "the session does not end"
        return {"ended": True}

    def sampled(self) -> list[int]:
        """The policy versions of a reply's tokens, which a request would get now.

        Raises:
            EngineError: the engine is quarantined.
        """
        if self.ranks[0].state is not State.SERVING:
            raise EngineError("the engine is quarantined", 503)
        return [self.ranks[0].policy.version] * 3

    def _begin(self, message: dict[str, Any]) -> dict[str, Any]:
        policy = Policy(message["run"], message["version"])
        transaction = message["transaction"]
        if message["retry"]:
            if self.ranks[0].committed_by(transaction, policy):
                return {"committed": True}
            if all(weights.is_in_doubt(transaction, policy) for weights in self.ranks):
                for weights in self.ranks:
                    weights.settle()
                return {"committed": True}
        try:
            for weights in self.ranks:
                weights.check_policy(policy)
            if "manifest" in message:
                manifest = Manifest.from_json(message["manifest"])
                assert manifest.fingerprint == message["fingerprint"]
                for weights in self.ranks:
                    weights.accept(manifest)
        except ManifestError as error:
            raise EngineError(str(error), 400) from error
        if not all(weights.knows(message["fingerprint"]) for weights in self.ranks):
            return {"unknown": True}
        threads = [
            RankThread(
                weights.begin(message["fingerprint"], policy),
                rank,
                self.silence_s,
                message["engines"],
            )
            for rank, weights in enumerate(self.ranks)
        ]
        self._watch = threading.Thread(target=self._end, args=(threads, transaction), daemon=True)
        self._watch.start()
        sockets = [thread.path for thread in threads]
        if not message.get("relay"):
            return {"token": TOKEN, "sockets": sockets}
        relay = Relay("127.0.0.1", self.silence_s, self.memories)
        relay.start(sockets, TOKEN)
        self.relays.append(relay)
        return {"token": TOKEN, "relay": {"host": "127.0.0.1", "port": relay.port}}

    def _end(self, threads: list[RankThread], transaction: str) -> None:
        self.outcomes = [thread.outcome() for thread in threads]
        failed = next((o.reason for o in self.outcomes if not o.committed), "")
        ok = committed(self.outcomes)
        goes_back = not ok and all(o.goes_back or not o.dirty for o in self.outcomes)
        if goes_back:
            for weights in self.ranks:
                assert weights.session is not None
                weights.session.undo()
        for weights, thread in zip(self.ranks, threads, strict=True):
            if ok:
                weights.commit(transaction)
            elif any(o.dirty for o in self.outcomes) and not goes_back:
                voted = all(o.voted for o in self.outcomes)
                weights.quarantine(failed, transaction if voted else "")
            else:
                weights.resume()
            reply(thread.peer, {"ok": True} if ok else {"error": failed})
