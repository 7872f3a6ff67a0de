"""The control channel in the main process: one JSON message in, one JSON reply out.

``sgl.Engine`` reaches it as ``engine.fp8rl_control(message)``, HTTP clients as ``POST /fp8rl``. It
pauses generation around a session and speaks to the schedulers over SGLang's own rpc socket.
"""

import asyncio
import hmac
import ipaddress
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import zmq

from server_args import Fp8RLServerArgs
from sgl_fp8rl import compat
from sgl_fp8rl.constants import NAME
from sgl_fp8rl.engine.scheduler import RPC_METHOD
from sgl_fp8rl.options import current_options
from sgl_fp8rl.protocol.manifest import (
    PROTOCOL,
    ManifestError,
    check_in_flight,
)
from sgl_fp8rl.protocol.place import here
from sgl_fp8rl.protocol.states import ABORT, FINISH, State
from sgl_fp8rl.protocol.values import excerpt
from sgl_fp8rl.weight_update.rank_server import heard_at
from sgl_fp8rl.weight_update.relay import Memories, Relay

POLL_S = 0.0005
SPIN_S = 0.005
"""How long a reply is awaited without sleeping: most take less than a sleep would add."""
DRAIN_TIMEOUT_S = 60.0
"""How long requests that were aborted for an update may take to leave the scheduler, and others to
end before memory is released."""
ANSWER_TIMEOUT_S = 60.0
"""How long the schedulers may take to answer before ``/health`` reports that they hang."""
EXPORT_TIMEOUT_S = 600.0
"""As ``ANSWER_TIMEOUT_S``, of an export: as long as its client waits for the answer."""
WAIT_POLL_S = 0.05
"""Between two attempts to begin where no request is aborted; each may retract all of them."""
FINISH_TIMEOUT_S = 570.0
"""How long an update waits for the end of requests: less than its trainer waits for the answer."""
PATH = "/fp8rl"
FORWARDING_HEADERS = ("x-forwarded-for", "forwarded")
"""A proxy names in them for whom it asks."""


class ControlError(RuntimeError):
    """A refused control message; ``status`` is its HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Control:
    """Serves control messages for one engine; at most one update session at a time."""

    def __init__(self, tokenizer_manager: Any, rpc: zmq.Socket[bytes], server_args: Any) -> None:
        self._manager = tokenizer_manager
        self._rpc = rpc
        self._server_args = server_args
        self.options = current_options()
        self.lock = asyncio.Lock()
        """One message at a time."""
        self._session: asyncio.Task[None] | None = None
        self._ended: dict[str, Any] | None = None
        self._described: dict[str, Any] = {}
        self._memories = Memories(self.options.bucket_bytes)
        tokenizer_manager.fp8rl_control = self  # for hooks (memory_release.py)

    async def handle(self, message: Any) -> dict[str, Any]:
        """Answer one message.

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
                return await self._begin(message)
            if op in ("layers", "tensors", "digest", "kv", "kv_observe", "kv_recalibrate"):
                return await self._ask({"op": op})
            if op in ("export_plan", "export"):
                return await self._ask(message)
        raise ControlError(f"control message {excerpt(op)} is unknown; install the same sgl-fp8rl")

    async def _describe(self, op: str) -> dict[str, Any]:
        """Answer ``status``, or ``layout``, which also names tensors and so takes longer."""
        if self._session is None:
            described = await self._ask({"op": op})
            self._described |= described
        else:
            described = {**self._described, "state": State.UPDATING.value}
        return {
            "protocol": PROTOCOL,
            "sglang": compat.sglang_version(),
            "tp_size": self._server_args.tp_size,
            "bucket_bytes": self.options.bucket_bytes,
            "place": here(),
            "logprobs": {"raw": _returns_raw_logprobs()},
            **described,
        }

    async def _begin(self, message: dict[str, Any]) -> dict[str, Any]:
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
        # held to the session's end: new requests wait for it, as do a user's pause and continue
        await self._manager.is_pause_cond.acquire()
        was_paused, self._manager.is_pause = self._manager.is_pause, True
        session = False
        try:
            token = secrets.token_hex(16)
            begun = await self._drain_and_begin({**message, "token": token}, in_flight)
            session = "sockets" in begun
            if begun.get("committed"):  # perhaps only now
                self._manager._update_weight_version_if_provided(str(message["version"]))
        finally:
            if not session:  # whatever it is, the engine must not stay paused
                self._resume(was_paused)
        if session:
            sockets = begun["sockets"]
            self._session = asyncio.create_task(self._watch(was_paused, sockets))
            if relayed:
                begun = {"relay": self._relay(sockets, token)}
            return {"token": token, **begun}
        return begun

    def _relay(self, sockets: Sequence[str], token: str) -> dict[str, Any]:
        """Where a trainer on another host finds the ranks.

        Raises:
            ControlError: the server's address cannot be listened at; the session ends unanswered.
        """
        host, silence_s = self._server_args.host, self.options.session_timeout_s
        try:
            relay = Relay(host, sockets, token, silence_s, self._memories)
        except OSError as error:
            raise ControlError(
                f"the engine cannot listen at {host} for a trainer on another host ({error}); "
                f"start it with --host, an address of its own"
            ) from None
        return {"host": host, "port": relay.port}

    async def _drain_and_begin(self, message: dict[str, Any], in_flight: str) -> dict[str, Any]:
        limit_s = FINISH_TIMEOUT_S if in_flight == FINISH else DRAIN_TIMEOUT_S
        poll_s = POLL_S if in_flight == ABORT else WAIT_POLL_S
        deadline = asyncio.get_running_loop().time() + limit_s
        begun = await self._ask(message)  # refused before any request is disturbed
        message.pop("manifest", None)
        while begun.get("busy"):
            if in_flight == ABORT:
                # SGLang's own pause sleeps for a second between its looks, and its own
                # abort_request (0.5.17) also fails the requests that wait at the tokenizer for the
                # new version.
                self._manager._dispatch_to_scheduler(compat.AbortReq(abort_all=True))
            begun = await self._ask(message)
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

    async def _watch(self, was_paused: bool, sockets: Sequence[str] = ()) -> None:
        """Wait for the schedulers to end the session, however it ends, and generate again."""
        try:
            self._ended = await self._receive(self.options.session_timeout_s, sockets)
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
            while not (await self._ask({"op": "idle"}))["idle"]:
                if self._manager.is_pause:
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

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            parameters = {"message": json.dumps(message)}
        except RecursionError:
            raise ControlError("the message is nested too deeply; send a control message") from None
        compat.sock_send(self._rpc, compat.RpcReqInput(method=RPC_METHOD, parameters=parameters))
        healthy_s = EXPORT_TIMEOUT_S if message.get("op") == "export" else ANSWER_TIMEOUT_S
        reply = await self._receive(healthy_s)
        if "error" in reply:
            raise ControlError(reply["error"], 409 if reply.get("busy") else 400)
        return reply

    async def _receive(self, healthy_s: float, sockets: Sequence[str] = ()) -> dict[str, Any]:
        """Await the schedulers' reply. ``/health`` may fail after ``healthy_s`` without one, and
        without a message of the trainer on one of these sockets.
        """
        loop = asyncio.get_running_loop()
        soon, late = loop.time() + SPIN_S, time.time() + healthy_s
        while not self._rpc.poll(0):
            now = time.time()
            if now >= late:
                late = max([late, *(heard_at(path) + healthy_s for path in sockets)])
            if now < late:
                # /health looks at it: schedulers that serve an update answer nothing else meanwhile
                self._manager.last_receive_tstamp = now
            await asyncio.sleep(0 if loop.time() < soon else POLL_S)
        reply = json.loads(compat.sock_recv(self._rpc).message)
        assert isinstance(reply, dict)
        return reply


def _returns_raw_logprobs() -> bool:
    """Whether SGLang reports logprobs of the logits before temperature."""
    return os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "").lower() in ("1", "true")


def add_route(
    original: Any, server_args: Any, tokenizer_manager: Any, *args: Any, **kw: Any
) -> Any:
    """AROUND ``_setup_and_run_http_server``: serve ``POST /fp8rl`` beside SGLang's own routes."""
    if server_args.quantization == NAME:
        port_args = kw["port_args"] if "port_args" in kw else args[1]
        tokenizer_manager.fp8rl_is_server = True  # it has a warm-up (internal_requests.py)
        serve(server_args, tokenizer_manager, port_args)
    return original(server_args, tokenizer_manager, *args, **kw)


def serve(server_args: Any, tokenizer_manager: Any, port_args: Any) -> Control:
    """Make the control channel of a server, and its route on SGLang's application."""
    rpc = compat.get_zmq_socket(zmq.Context(1), zmq.DEALER, port_args.rpc_ipc_name, True)
    control = Control(tokenizer_manager, rpc, server_args)
    compat.http_app.add_api_route(PATH, _handler(control), methods=["POST"])
    return control


def control_engine(engine: Any, message: dict[str, Any]) -> dict[str, Any]:
    """``Engine.fp8rl_control``: the same messages for an engine in this process.

    Raises:
        ControlError: the message is refused.
    """
    control = getattr(engine, "_fp8rl_control", None)
    if control is None:
        if engine.server_args.quantization != NAME:
            raise ControlError("this engine does not run with quantization='fp8rl'")
        control = Control(engine.tokenizer_manager, engine.send_to_rpc, engine.server_args)
        engine._fp8rl_control = control
    return engine.loop.run_until_complete(control.handle(message))  # type: ignore[no-any-return]


def _handler(control: Control) -> Any:
    from fastapi import Request
    from fastapi.responses import JSONResponse

    async def fp8rl(request: Request) -> JSONResponse:
        try:
            _authorize(control.options, request)
            # shielded: a client that hangs up must not leave a reply of the schedulers unread
            reply = await asyncio.shield(control.handle(await _json(request)))
        except ControlError as error:
            return JSONResponse({"error": str(error)}, status_code=error.status)
        return JSONResponse(reply)

    # annotations of this module are objects, not strings: FastAPI sees the request parameter
    return compat.auth_level(compat.AuthLevel.ADMIN_OPTIONAL)(fp8rl)


async def _json(request: Any) -> Any:
    try:
        return json.loads(await request.body())
    except (ValueError, RecursionError):
        raise ControlError("the body is not JSON; send a control message") from None


def _authorize(options: Fp8RLServerArgs, request: Any) -> None:
    if options.listen == "loopback" and not _is_from_this_host(request):
        raise ControlError(
            "control messages are taken from this host only, and not through a proxy; start with "
            "--fp8rl-listen any and a key to take them from others",
            403,
        )
    given = request.headers.get("authorization", "")
    if options.key is not None and not hmac.compare_digest(
        given.encode(), f"Bearer {options.key}".encode()
    ):
        raise ControlError("the key is missing or wrong; set FP8RL_KEY to the server's key", 401)


def _is_from_this_host(request: Any) -> bool:
    """Whether the peer has a loopback address, or the very address that it connected to.

    Frameworks bind servers to the host's own address. ``scope["server"]`` is the connection's
    ``getsockname``, never a wildcard, and Linux drops packets from outside that claim an address of
    this host. A forwarding header takes the kernel's word away: uvicorn then writes its content
    into ``client``.
    """
    if any(name in request.headers for name in FORWARDING_HEADERS):
        return False
    peer, here = (_address(request.scope.get(end)) for end in ("client", "server"))
    return peer is not None and (peer.is_loopback or peer == here)


def _address(end: Any) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address of ``(host, port)``; None where it has none, as at a Unix socket."""
    try:
        address = ipaddress.ip_address(end[0])
    except (TypeError, ValueError):
        return None
    return getattr(address, "ipv4_mapped", None) or address
