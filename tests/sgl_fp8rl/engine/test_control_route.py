"""From whom the control route takes messages: peers of this host, by the kernel's word."""

import asyncio
import contextlib
import http.client
import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.requests import Request

from server_args import Fp8RLServerArgs
from sgl_fp8rl.engine.control import control_route
from sgl_fp8rl.engine.control.control import IsGone
from sgl_fp8rl.engine.control.control_route import PATH
from sgl_fp8rl.engine.control.scheduler_rpc import ControlError

LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 60.0
NODE, OTHER = ("10.0.0.4", 30000), ("10.0.0.5", 30000)


def refused(options: Fp8RLServerArgs, asked: Request) -> int:
    """With which status."""
    with pytest.raises(ControlError) as no:
        control_route._authorize(options, asked)
    return no.value.status


def request(client: Any, server: Any, **headers: str) -> Request:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "client": client, "server": server, "headers": raw})


@pytest.mark.parametrize(
    ("client", "server"),
    [
        ((LOOPBACK, 1), NODE),
        (("127.0.0.2", 1), (LOOPBACK, 30000)),
        (("::1", 1), ("::1", 30000)),
        (("10.0.0.4", 1), NODE),
        (("::ffff:10.0.0.4", 1), ("::ffff:10.0.0.4", 30000)),
        (("::ffff:10.0.0.4", 1), NODE),
        (("fd00::2", 1), ("fd00:0:0::2", 30000)),
    ],
)
def test_peers_of_this_host(client: Any, server: Any) -> None:
    control_route._authorize(Fp8RLServerArgs(), request(client, server))
    for header in ("x-forwarded-for", "forwarded"):
        assert refused(Fp8RLServerArgs(), request(client, server, **{header: LOOPBACK})) == 403
    keyed = Fp8RLServerArgs(key="secret")
    assert refused(keyed, request(client, server, authorization="Bearer x")) == 401


@pytest.mark.parametrize(
    ("client", "server"),
    [
        (OTHER, NODE),
        (("10.0.0.4", 1), (LOOPBACK, 30000)),
        (("10.0.0.5", 1), ("0.0.0.0", 30000)),
        (("fd00::3", 1), ("fd00::2", 30000)),
        (("fe80::1%eth0", 1), ("fe80::1%eth1", 30000)),
        (("10.0.0.4", 1), None),
        (None, None),
        (None, NODE),
        (("", 0), ("", 0)),
        (("server.sock", None), ("server.sock", None)),
    ],
)
def test_other_peers(client: Any, server: Any) -> None:
    assert refused(Fp8RLServerArgs(), request(client, server)) == 403
    anyone = Fp8RLServerArgs(listen="any", key="secret")
    assert refused(anyone, request(client, server)) == 401
    control_route._authorize(anyone, request(client, server, authorization="Bearer secret"))


# ---- what a real server sees


class Answers:
    """A control channel without an engine."""

    options = Fp8RLServerArgs()

    def __init__(self) -> None:
        self.was_gone: queue.SimpleQueue[bool] = queue.SimpleQueue()

    async def handle(self, message: Any, is_gone: IsGone) -> dict[str, Any]:
        if message["op"] == "begin":
            self.was_gone.put(await is_gone())
            while not await is_gone():
                await asyncio.sleep(0.01)
            self.was_gone.put(True)
        return {"op": message["op"]}


@pytest.fixture(scope="module")
def answers() -> Any:
    return Answers()


@pytest.fixture(scope="module")
def port(answers: Any) -> Iterator[int]:
    """A server on every address of this host that believes every proxy."""
    app = FastAPI()
    app.add_api_route(PATH, control_route._handler(answers), methods=["POST"])
    listening = socket.create_server(("0.0.0.0", 0))
    config = uvicorn.Config(app, forwarded_allow_ips="*", log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        assert server.started
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def address() -> str:
    """An address of this host that is not a loopback address."""
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # a route is looked up; nothing is sent
        found = str(probe.getsockname()[0])
        if not found.startswith("127."):
            return found
    pytest.skip("this host has loopback addresses only")


def post(port: int, to: str, source: str | None = None, **headers: str) -> tuple[int, Any]:
    bound = None if source is None else (source, 0)
    connection = http.client.HTTPConnection(to, port, timeout=60, source_address=bound)
    with contextlib.closing(connection):
        connection.request("POST", PATH, json.dumps({"op": "status"}), headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def test_a_server_answers_this_host_at_each_address(port: int, address: str) -> None:
    for to in (LOOPBACK, address):
        assert post(port, to) == (200, {"op": "status"})


def test_a_message_learns_that_its_caller_hung_up(port: int, answers: Any) -> None:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=60)
    connection.request("POST", PATH, json.dumps({"op": "begin"}))
    assert answers.was_gone.get(timeout=20) is False
    time.sleep(0.2)
    assert answers.was_gone.empty(), "it still waits"
    connection.close()
    assert answers.was_gone.get(timeout=20) is True


def test_neither_another_address_nor_a_header_is_of_this_host(port: int, address: str) -> None:
    """Both ends are this host's, but not equal, as those of another host are not."""
    assert post(port, LOOPBACK, source=address)[0] == 403
    for to in (LOOPBACK, address):
        for claimed in (LOOPBACK, address, f"{LOOPBACK}:5"):
            assert post(port, to, **{"X-Forwarded-For": claimed})[0] == 403
