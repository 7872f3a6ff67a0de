"""``POST /fp8rl``: the control channel of a server, and from whom it takes messages."""

import asyncio
import hmac
import ipaddress
import json
from typing import Any

import zmq

from server_args import Fp8RLServerArgs
from sgl_fp8rl.engine import compat
from sgl_fp8rl.engine.compat.settings import is_fp8rl
from sgl_fp8rl.engine.control.control import Control
from sgl_fp8rl.engine.control.scheduler_rpc import ControlError

PATH = "/fp8rl"
FORWARDING_HEADERS = ("x-forwarded-for", "forwarded")
"""A proxy names in them for whom it asks."""


def add_route(
    original: Any, server_args: Any, tokenizer_manager: Any, *args: Any, **kw: Any
) -> Any:
    """AROUND ``_setup_and_run_http_server``: serve ``POST /fp8rl`` beside SGLang's own routes."""
    if is_fp8rl(server_args):
        compat.check_live(tokenizer_manager, compat.IN_TOKENIZER_MANAGER)
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


def _handler(control: Control) -> Any:
    from fastapi import Request
    from fastapi.responses import JSONResponse

    async def fp8rl(request: Request) -> JSONResponse:
        try:
            _authorize(control.options, request)
            # shielded: a client that hangs up must not leave a reply of the schedulers unread
            handling = control.handle(await _json(request), request.is_disconnected)
            reply = await asyncio.shield(handling)
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
    if "origin" in request.headers:  # browsers send it with each post, of any content type
        raise ControlError("control messages are not taken from web pages; use another client", 403)
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
