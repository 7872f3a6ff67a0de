"""The control channel in the main process: one JSON message in, one JSON reply out.

Callers in this process reach it by ``control_in_process.py``, others by ``control_route.py``. It
pauses generation around a session, and has the schedulers answer by ``scheduler_rpc.py``.
"""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import zmq

from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.compat.settings import resolved
from sgl_fp8rl.engine.control.scheduler import unknown
from sgl_fp8rl.engine.control.scheduler_rpc import BUSY_STATUS, POLL_S, ControlError, SchedulerRpc
from sgl_fp8rl.options import current_options
from sgl_fp8rl.protocol.manifest import ManifestError, check_in_flight
from sgl_fp8rl.protocol.place import here
from sgl_fp8rl.protocol.states import ABORT, FINISH, State
from sgl_fp8rl.receiver.relay.memory import RelayMemory
from sgl_fp8rl.receiver.relay.relay import Relay

DRAIN_TIMEOUT_S = 60.0
"""How long requests that were aborted for an update may take to leave the scheduler, and others to
end before memory is released."""
WAIT_POLL_S = 0.05
"""Between two attempts to begin where no request is aborted; each may retract all of them."""
SETTLE_S = 1.0
"""How long a scheduler may take to see that a request has ended whose reply it sent."""
FINISH_TIMEOUT_S = 570.0
"""How long an update waits for the end of requests: less than its trainer waits for the answer."""
GONE = "the trainer is gone; its update has not begun"


IsGone = Callable[[], Awaitable[bool]]


class Control:
    """Serves control messages for one engine; at most one update session at a time."""

    def __init__(self, tokenizer_manager: Any, rpc: zmq.Socket[bytes], server_args: Any) -> None:
        self._manager = tokenizer_manager
        self._schedulers = SchedulerRpc(rpc, tokenizer_manager)
        self._settings = resolved(server_args)
        self.options = current_options()
        self.lock = asyncio.Lock()
        """One message at a time."""
        self._session: asyncio.Task[None] | None = None
        self._ended: dict[str, Any] | None = None
        self._described: dict[str, Any] = {}
        self._memories = RelayMemory(
            self.options.bucket_bytes, self.options.snapshot_bytes, self.options.network
        )
        tokenizer_manager.fp8rl_control = self  # for hooks (memory_release.py)

    async def handle(self, message: Any, is_gone: IsGone | None = None) -> dict[str, Any]:
        """Answer one message.

        Args:
            is_gone: whether its caller waits no more; an update that no request makes way for yet
                is given up then.

        Raises:
            ControlError: the message is refused; nothing changed.
        """
        # inside of the loop that serves: called from elsewhere it would make a loop of its own
        self._manager.auto_create_handle_loop()
        op = message.get("op") if isinstance(message, dict) else None
        if op == "end":
            return await self._end()
        async with self.lock:
            if op in ("status", "layout"):
                return await self._describe(op)
            if self._session is not None:
                raise ControlError("an update is under way; wait for its end", 409)
            if op == "begin":
                return await self._begin(message, is_gone)
            if op in ("layers", "tensors", "digest", "code_sums", "kv"):
                return await self._schedulers.ask({"op": op})
            if op == "export_layout":
                return await self._schedulers.ask(message)
            if op == "kv_recalibrate":
                return await self._ask_idle({"op": op})
        raise ControlError(unknown(op))

    async def _describe(self, op: str) -> dict[str, Any]:
        """Answer ``status``, or ``layout``, which also names tensors and so takes longer."""
        if self._session is None:
            described = await self._schedulers.ask({"op": op})
            self._described |= described
        else:
            described = {**self._described, "state": State.UPDATING.value}
        return {
            "bucket_bytes": self.options.bucket_bytes,
            "place": here(),
            "logprobs": {"raw": _returns_raw_logprobs()},
            **described,
        }

    async def _begin(self, message: dict[str, Any], is_gone: IsGone | None) -> dict[str, Any]:
        """Open a session, or answer ``unknown`` where the whole manifest must be sent."""
        relayed = message.pop("relay", False) is True
        if relayed and self.options.listen != "any":
            raise ControlError(
                "an update from another host, or from another container, needs --fp8rl-listen any "
                "and a key; start the engine with both, or run the trainer where it sees the "
                "engine's temporary folder",
                403,
            )
        try:
            in_flight = check_in_flight(message.get("in_flight", ABORT))
        except ManifestError as error:
            raise ControlError(str(error)) from None
        relay = self._relay() if relayed else None
        # held to the session's end: new requests wait for it, as do a user's pause and continue
        await self._manager.is_pause_cond.acquire()
        was_paused, self._manager.is_pause = self._manager.is_pause, True
        session = False
        try:
            token = secrets.token_hex(16)
            message = {**message, "token": token, "paused": was_paused}
            begun = await self._drain_and_begin(message, in_flight, is_gone)
            session = "sockets" in begun
            if begun.get("committed"):  # perhaps only now
                self._manager._update_weight_version_if_provided(str(message["version"]))
        finally:
            if not session:  # whatever it is, the engine must not stay paused
                self._resume(was_paused)
                if relay is not None:
                    relay.close()
        if session:
            sockets = begun["sockets"]
            self._session = asyncio.create_task(self._watch(was_paused, sockets))
            if relay is not None:
                relay.start(sockets, token)
                begun = {"relay": {"host": self._settings.host, "port": relay.port}}
            return {"token": token, **begun}
        return begun

    def _relay(self) -> Relay:
        """Listens for a trainer on another host."""
        try:
            return Relay(self._settings.host, self.options.session_timeout_s, self._memories)
        except OSError as error:
            raise ControlError(
                f"the engine cannot listen at {self._settings.host} for a trainer on another host "
                f"({error}); start it with --host, an address of its own"
            ) from None

    async def _drain_and_begin(
        self, message: dict[str, Any], in_flight: str, is_gone: IsGone | None
    ) -> dict[str, Any]:
        limit_s = FINISH_TIMEOUT_S if in_flight == FINISH else DRAIN_TIMEOUT_S
        poll_s = POLL_S if in_flight == ABORT else WAIT_POLL_S
        deadline = asyncio.get_running_loop().time() + limit_s
        if is_gone is not None and await is_gone():  # while another message was served
            raise ControlError(GONE, 409)
        begun = await self._schedulers.ask(message)  # refused before any request is disturbed
        message.pop("manifest", None)
        while begun.get("busy"):
            if is_gone is not None and await is_gone():
                raise ControlError(GONE, 409)
            if in_flight == ABORT:
                # SGLang's own pause sleeps for a second between its looks, and its own
                # abort_request (0.5.17) also fails the requests that wait at the tokenizer for the
                # new version.
                self._manager._dispatch_to_scheduler(compat.AbortReq(abort_all=True))
            begun = await self._schedulers.ask(message)
            if not begun.get("busy"):
                break
            if asyncio.get_running_loop().time() > deadline:
                raise ControlError(
                    f"requests were still running after {limit_s:.0f} s (in_flight is "
                    f"{in_flight!r}); the engine keeps its version, try again",
                    503,
                )
            await asyncio.sleep(poll_s)
        return begun

    async def _watch(self, was_paused: bool, sockets: Sequence[str]) -> None:
        """Wait for the schedulers to end the session, however it ends, and generate again."""
        try:
            self._ended = await self._schedulers.receive(self.options.session_timeout_s, sockets)
            if self._ended.get("ended"):
                # the `weight_version` of SGLang's own replies
                self._manager._update_weight_version_if_provided(str(self._ended["version"]))
        finally:
            self._session = None
            self._resume(was_paused)

    @asynccontextmanager
    async def idle(self) -> AsyncIterator[None]:
        """Nothing runs meanwhile: requests end first, and new ones wait.

        Raises:
            ControlError: requests do not end.
        """
        loop = asyncio.get_running_loop()
        async with self.lock, self._manager.is_pause_cond:  # in the order in which `begin` does
            deadline = loop.time() + DRAIN_TIMEOUT_S
            while not (found := await self._schedulers.ask({"op": "idle"}))["idle"]:
                # under a pause that aborts, the schedulers go on until what they run has ended
                if self._manager.is_pause and found["paused"]:
                    raise ControlError(
                        "generation is paused, so requests in flight cannot end; abort them, or "
                        "continue_generation before the release",
                        409,
                    )
                if loop.time() > deadline:
                    raise ControlError(
                        f"requests were still running after {DRAIN_TIMEOUT_S:.0f} s; abort them, "
                        f"or release when they have ended",
                        503,
                    )
                await asyncio.sleep(WAIT_POLL_S)
            yield

    def _resume(self, was_paused: bool) -> None:
        # the scheduler was never paused, so SGLang's own continue_generation has a message less
        self._manager.is_pause = was_paused
        self._manager.is_pause_cond.release()

    async def _end(self) -> dict[str, Any]:
        """Wait until the session that is under way has ended, and report how the last one did."""
        if self._session is not None:
            await asyncio.shield(self._session)
        if self._ended is None:
            raise ControlError("no update has begun yet", 409)
        return self._ended

    async def _ask_idle(self, message: dict[str, Any]) -> dict[str, Any]:
        """Ask what is refused while requests run, for a moment again and again: the overlapped
        scheduler is a step behind the last reply that it sent."""
        loop = asyncio.get_running_loop()
        deadline = None
        while True:
            try:
                return await self._schedulers.ask(message)
            except ControlError as error:
                deadline = deadline or loop.time() + SETTLE_S  # the first answer may be late
                if error.status != BUSY_STATUS or loop.time() > deadline:
                    raise
            await asyncio.sleep(WAIT_POLL_S)


def _returns_raw_logprobs() -> bool:
    """Whether SGLang reports logprobs of the logits before temperature."""
    return os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "").lower() in ("1", "true")
