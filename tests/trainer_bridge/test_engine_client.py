"""Engine clients: what ``connect`` accepts, what is sent, and every failure as one sentence."""

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException

from tests.trainer_bridge.test_http_requests import Peers, listen, started, url_of
from trainer_bridge.engines import http_requests
from trainer_bridge.engines.engine_client import (
    EngineError,
    InProcessEngine,
    call_all,
    connect,
)


class Server:
    """Answers every POST as told, and keeps what came."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.answer: Callable[[Any], tuple[int, bytes]] = lambda body: (200, b"{}")
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append((self.path, dict(self.headers), body))
                status, reply = server.answer(body)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}"

    def answers(self, status: int, body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.answer = lambda _: (status, data)

    def __enter__(self) -> "Server":
        started(self.http.serve_forever, 0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.delenv("FP8RL_KEY", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as server:
        yield server


class Stock:
    """An engine without the plugin."""

    def generate(self) -> None: ...


ADDRESSES = "localhost:30000", "", "ftp://host", "/tmp/socket", "http://", "http://host:port"


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        *(
            (engine, f"{type(engine).__name__} .*quantization='fp8rl'")
            for engine in (None, 3, object(), [], {"control": 1}, Stock())
        ),
        *((address, f"{address!r}.*http://host:port") for address in ADDRESSES),
    ],
)
def test_connect_refuses_what_is_no_engine_or_address(engine: Any, sentence: str) -> None:
    with pytest.raises(EngineError, match=sentence):
        connect(engine)


def test_control_posts_json_with_the_key(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answers(200, {"version": 4})
    client = connect(server.address + "/")
    assert client.control({"op": "layout"}) == {"version": 4}
    ((path, headers, body),) = server.requests
    assert (path, body) == ("/fp8rl", {"op": "layout"})
    assert headers["Content-Type"] == "application/json"
    assert "Authorization" not in headers
    connect(server.address, key="secret").control({})
    monkeypatch.setenv("FP8RL_KEY", "from the environment")
    connect(server.address).control({})
    connect(server.address, key="secret").control({})
    keys = [headers["Authorization"] for _, headers, _ in server.requests[1:]]
    assert keys == ["Bearer secret", "Bearer from the environment", "Bearer secret"]


@pytest.mark.parametrize(
    ("address", "key", "warns"),
    [
        *((f"http://{host}:30000", "secret", True) for host in ("10.0.0.7", "e7", "[2001:db8::1]")),
        ("https://10.0.0.7:30000", "secret", False),
        ("http://10.0.0.8:30000", None, False),
        *((f"http://{host}:3", "secret", False) for host in ("127.0.0.3", "[::1]", "localhost")),
    ],
)
def test_a_key_that_the_network_can_read(
    address: str, key: str | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for each server, and never the key itself."""
    for _ in range(2):
        connect(address, key)
    assert [address in record.getMessage() for record in caplog.records] == [True] * warns
    assert "secret" not in caplog.text


def test_each_request_has_its_own_reply_or_error(server: Server) -> None:
    def answer(body: Any) -> tuple[int, bytes]:
        if body["input_ids"] == [2]:
            return 400, b'{"error": {"message": "too long"}}'
        return 200, json.dumps({"output_ids": body["input_ids"]}).encode()

    server.answer = answer
    one, two, three = connect(server.address, key="secret").sample(
        [{"input_ids": [i]} for i in (1, 2, 3)]
    )
    assert (one, three) == ({"output_ids": [1]}, {"output_ids": [3]})
    assert isinstance(two, EngineError)
    assert (str(two), two.status) == ("too long", 400)
    assert {path for path, _, _ in server.requests} == {"/generate"}
    assert {headers["Authorization"] for _, headers, _ in server.requests} == {"Bearer secret"}


@pytest.mark.guarantee("malformed", fault="a reply that is longer than any")
@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (200, b"x" * 200_001, "more than 200000 bytes"),
        (409, {"error": "an update is under way"}, "an update is under way"),
        (400, {"error": {"message": "too long", "type": "x"}}, "too long"),
        (404, {"detail": "Not Found"}, '/fp8rl answered 404: {"detail": "Not Found"}'),
        (502, b"<html>Bad gateway</html>", "/fp8rl answered 502: <html>Bad gateway</html>"),
        (500, b"", "/fp8rl answered 500: "),
        (500, [1], "/fp8rl answered 500: [1]"),
        (500, "text", '/fp8rl answered 500: "text"'),
        (500, b"\xff\xfe", "/fp8rl answered 500: "),
        *((400, body, "/fp8rl answered 400: ") for body in ("a page", None, [1], b"[" * 100_000)),
        *((200, body, "is it an fp8rl server?") for body in ("a page", None, [1])),
        *((200, body, "is it up?") for body in (b"<html>", b"", b"\xff", b"[" * 100_000)),
    ],
)
def test_what_is_no_reply_becomes_a_sentence(
    server: Server, status: int, body: Any, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_requests, "LONGEST_REPLY", 200_000)
    server.answers(status, body)
    with pytest.raises(EngineError, match=server.address if status == 200 else None) as caught:
        connect(server.address).control({"op": "layout"})
    assert caught.value.status == (None if status == 200 else status)
    assert sentence in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.guarantee("several-engines", fault="a server that takes a message and does not answer")
def test_a_server_that_hangs() -> None:
    """It has taken the request; others must not wait for it for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = connect(url_of(listener).removesuffix("/generate"))
        began = time.monotonic()
        with pytest.raises(EngineError, match="cannot be reached"):
            client.control({"op": "begin"}, 0.3)
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n", b"nonsense" * 1000 + b"\r\n\r\n"])
def test_a_server_that_breaks_off(answer: bytes) -> None:
    def serve(peers: Peers) -> None:
        with peers[0][0] as peer:
            peer.sendall(answer)

    with listen(serve) as url:
        address = url.removesuffix("/generate")
        with pytest.raises(EngineError, match=address) as fault:
            connect(address).control({})
    assert len(str(fault.value)) < 400 and "\n" not in str(fault.value)


class RefusedError(RuntimeError):
    """As the engine's ControlError."""

    status = 409


class Engine:
    """An ``sgl.Engine`` that answers, or raises what it is told to."""

    def __init__(
        self, fault: Exception | None = None, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.fault, self._loop = fault, loop
        self.calls: list[dict[str, Any]] = []
        self.running = 0
        tokenizer = SimpleNamespace(encode=lambda prompt: [ord(c) for c in prompt])
        self.tokenizer_manager = SimpleNamespace(tokenizer=tokenizer)

    def fp8rl_control(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if self.fault is not None:
            raise self.fault
        return {"echo": message}

    def fp8rl_run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        assert self._loop is not None
        return self._loop.run_until_complete(coroutine)

    async def async_generate(self, **arguments: Any) -> Any:
        """Long prompts take their time."""
        self.calls.append(arguments)
        self.running += 1
        try:
            await asyncio.sleep(60 if len(arguments["input_ids"]) > 2 else 0)
            if self.fault is not None and arguments["input_ids"] == [2]:
                raise self.fault
            return {"output_ids": arguments["input_ids"]}
        finally:
            self.running -= 1


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def engine(loop: asyncio.AbstractEventLoop) -> Engine:
    return Engine(loop=loop)


def test_an_engine_of_this_process(engine: Engine) -> None:
    """Prompts are tokenized where their ids are wanted."""
    client = connect(engine)
    assert isinstance(client, InProcessEngine)
    assert client.control({"op": "layout"}) == {"echo": {"op": "layout"}}
    request = {"text": "bc", "return_prompt_token_ids": True, "stream": False}
    tokenized = {"output_ids": [98, 99], "prompt_token_ids": [98, 99]}
    assert client.sample([request, {"input_ids": [1]}]) == [tokenized, {"output_ids": [1]}]
    assert engine.calls == [{"input_ids": [98, 99], "stream": False}, {"input_ids": [1]}]
    assert request["text"] == "bc"  # the caller's request is left alone
    engine.tokenizer_manager.tokenizer = None
    with pytest.raises(EngineError, match="pass prompts as token ids"):
        client.sample([{"text": "a"}])


def test_an_engine_of_this_process_waits_for_no_other(engine: Engine) -> None:
    called = threading.Event()
    others = [(connect("http://127.0.0.1:1"), lambda: called.wait(10))] * 2
    here: Any = (connect(engine), called.set)
    assert call_all([*others, here]) == [True, True, None]


@pytest.mark.parametrize(
    ("fault", "status"),
    [(RefusedError("wait"), 409), (RuntimeError("wait"), None), (ValueError("wait"), None)],
)
def test_a_refused_message(fault: Exception, status: int | None) -> None:
    with pytest.raises(EngineError, match=r"^wait$") as caught:
        connect(Engine(fault)).control({"op": "begin"})
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("fault", "status"),
    [(HTTPException(503, "quarantined: it broke off"), 503), (ValueError("it broke off"), 400)],
)
def test_a_refused_generation_loses_one_request(
    engine: Engine, fault: Exception, status: int
) -> None:
    engine.fault = fault
    one, two, three = connect(engine).sample([{"input_ids": [i]} for i in (1, 2, 3)])
    assert (one, three) == ({"output_ids": [1]}, {"output_ids": [3]})
    assert isinstance(two, EngineError) and two.status == status and "it broke off" in str(two)


@pytest.mark.parametrize("has_fastapi", [True, False])
def test_another_fault_of_generation_is_not_disguised(
    engine: Engine, has_fastapi: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_fastapi:
        monkeypatch.delitem(sys.modules, "fastapi")
    engine.fault = KeyError("x")
    with pytest.raises(KeyError):
        connect(engine).sample([{"input_ids": [2]}, {"input_ids": [1, 2, 3]}])
    assert engine.running == 0  # SGLang aborts what is cancelled


def test_a_generation_that_takes_too_long_is_cancelled(engine: Engine) -> None:
    one, late = connect(engine).sample([{"input_ids": [1]}, {"input_ids": [1, 2, 3]}], timeout=0.2)
    assert one == {"output_ids": [1]}
    assert isinstance(late, EngineError)
    assert "no answer within 0.2 s" in str(late)
    assert engine.running == 0


def test_a_call_on_the_loop_that_runs_it_is_refused(engine: Engine) -> None:
    def refuse(coroutine: Coroutine[Any, Any, Any]) -> None:
        coroutine.close()
        raise RefusedError("call from another thread")

    engine.fp8rl_run = refuse  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="another thread") as caught:
        connect(engine).sample([{"input_ids": [1]}])
    assert caught.value.status == 409
