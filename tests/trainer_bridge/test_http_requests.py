"""Many POST requests at once: deadlines, dead servers, and the limit of file descriptors."""

import json
import resource
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from trainer_bridge import http_requests
from trainer_bridge.http_requests import Answer, Fault, post_all

Peers = list[tuple[socket.socket, Any]]
"""Connections, and what was sent on each."""
REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def read_request(peer: socket.socket) -> Any:
    """The JSON of one request; None where the client has gone."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (part := peer.recv(65536)):
            return None
        data += part
    head, body = data.split(b"\r\n\r\n", 1)
    (length,) = (line for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
    while len(body) < int(length.split(b":")[1]):
        body += peer.recv(65536)
    return json.loads(body)


@contextmanager
def listen(serve: Callable[[Peers], None], count: int, rounds: int = 1) -> Iterator[str]:
    """A server that takes ``count`` requests before it serves any, again and again; yields its
    URL."""
    peers: Peers = []
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:

        def run() -> None:
            for _ in range(rounds):
                for _ in range(count):
                    peer, _ = listener.accept()
                    peers.append((peer, read_request(peer)))
                serve(peers[-count:])

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/generate"
        thread.join(10)
        for peer, _ in peers:
            peer.close()


def answers(url: str, count: int, timeout: float | None = None) -> dict[int, Answer | Fault]:
    return dict(post_all(url, list(range(count)), {}, timeout))


def test_answers_come_in_any_order_and_are_told_apart() -> None:
    def serve(peers: Peers) -> None:
        for peer, message in reversed(peers):
            body = str(message).encode()
            peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    with listen(serve, 40) as url:
        assert answers(url, 40) == {i: (200, str(i).encode()) for i in range(40)}


def test_a_server_that_dies_loses_only_what_it_has_not_answered() -> None:
    def serve(peers: Peers) -> None:
        for peer, message in peers:
            if message != 2:
                peer.sendall(REPLY)
            peer.close()

    with listen(serve, 4) as url:
        found = answers(url, 4)
    assert isinstance(found.pop(2), ConnectionError)
    assert set(found.values()) == {(200, b"ok")}


def test_the_deadline_is_that_of_all_requests() -> None:
    def serve(peers: Peers) -> None:
        peers[0][0].sendall(REPLY)

    with listen(serve, 3) as url:
        started = time.monotonic()
        found = answers(url, 3, timeout=0.3)
        assert time.monotonic() - started < 5
    assert found[0] == (200, b"ok")
    assert isinstance(found[1], TimeoutError) and isinstance(found[2], TimeoutError)


def test_a_host_that_does_not_answer_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def connect(peer: Any, timeout: float | None) -> socket.socket:
        tried.append(peer)
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", connect)
    found = answers("http://engine:30000/generate", 512)
    assert len(found) == 512
    assert all(isinstance(fault, TimeoutError) for fault in found.values())
    assert tried == [("engine", 30000)]


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_requests, "MAX_CONNECTIONS", 1)  # a connection that fails is not one
    with socket.create_server(("127.0.0.1", 0)) as gone:
        url = f"http://127.0.0.1:{gone.getsockname()[1]}/generate"
    found = answers(url, 3)
    assert [type(fault) for fault in found.values()] == [ConnectionRefusedError] * 3


def test_requests_that_are_given_up_are_closed() -> None:
    closed: list[bool] = []

    def serve(peers: Peers) -> None:
        peers[0][0].sendall(REPLY)
        closed.extend(peer.recv(1) == b"" for peer, _ in peers[1:])

    with listen(serve, 3) as url:
        iterator = post_all(url, [0, 1, 2], {})
        next(iterator)
        iterator.close()
    assert closed == [True, True]


def test_a_dead_host_is_noticed_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keepalive is on, and its probes end within two minutes."""
    opened: list[socket.socket] = []
    options: list[int] = []
    connect = socket.create_connection

    def keep(*args: Any) -> socket.socket:
        opened.append(connect(*args))
        return opened[-1]

    def serve(peers: Peers) -> None:
        options.append(opened[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
        options.extend(
            opened[0].getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        )
        peers[0][0].sendall(REPLY)

    monkeypatch.setattr(socket, "create_connection", keep)
    with listen(serve, 1) as url:
        assert answers(url, 1) == {0: (200, b"ok")}
    is_on, idle, interval, count = options
    assert is_on
    assert idle + interval * count <= 120


def test_the_limit_of_descriptors_is_raised_as_far_as_needed() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert http_requests._allowed_sockets(1000) == 1000
        assert 1000 < resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_with_few_descriptors_the_last_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(peers: Peers) -> None:
        for peer, _ in peers:
            peer.sendall(REPLY)

    monkeypatch.setattr(resource, "getrlimit", lambda _: (300, 300))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(http_requests, "SPARE_DESCRIPTORS", 300)
    with (
        listen(serve, 1, rounds=3) as url,
        pytest.warns(RuntimeWarning, match="file descriptors allows only 1 at once"),
    ):
        assert answers(url, 3) == dict.fromkeys(range(3), (200, b"ok"))
