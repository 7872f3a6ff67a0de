"""Many POST requests at once: deadlines, dead servers, and the limit of file descriptors."""

import asyncio
import json
import os
import resource
import signal
import socket
import ssl
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from trainer_bridge.engines import http_requests
from trainer_bridge.engines.http_requests import Answer, Fault, ReplyTooLongError, post_all

Peers = list[tuple[socket.socket, Any]]
"""Connections, and what was sent on each."""
REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def read_request(peer: socket.socket) -> Any:
    """The JSON of one request; None where the client has gone."""
    with peer.makefile("rb") as stream:
        length = 0
        for line in iter(stream.readline, b"\r\n"):
            if not line:
                return None
            if line.startswith(b"Content-Length"):
                length = int(line.split(b":")[1])
        return json.loads(stream.read(length))


def started(run: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=run, args=arguments, daemon=True)
    thread.start()
    return thread


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    return f"{scheme}://127.0.0.1:{listener.getsockname()[1]}/generate"


@contextmanager
def listen(serve: Callable[[Peers], None], count: int = 1, rounds: int = 1) -> Iterator[str]:
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

        thread = started(run)
        yield url_of(listener)
        thread.join(10)
        for peer, _ in peers:
            peer.close()


def answer_all(peers: Peers) -> None:
    for peer, _ in peers:
        peer.sendall(REPLY)


def answers(url: str, count: int = 1, timeout: float | None = None) -> dict[int, Answer | Fault]:
    return dict(enumerate(post_all(url, list(range(count)), {}, lambda answer: answer, timeout)))


class Reader:
    """Collects answers as they come, and notes when so many have."""

    def __init__(self, count: int) -> None:
        self.found: list[Answer | Fault] = []
        self.enough = threading.Event()
        self._count = count

    def __call__(self, answer: Answer | Fault) -> Answer | Fault:
        self.found.append(answer)
        if len(self.found) == self._count:
            self.enough.set()
        return answer


def test_answers_come_in_any_order_and_are_told_apart() -> None:
    """All are at the server at once, as continuous batching and prefix caching need."""

    def serve(peers: Peers) -> None:
        for peer, message in reversed(peers):
            body = str(message).encode()
            peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    with listen(serve, 512) as url:
        assert answers(url, 512) == {i: (200, str(i).encode()) for i in range(512)}


UNFINISHED = {
    "the status line": b"HTTP/1.1 200 O",
    "the headers": b"HTTP/1.1 200 OK\r\nContent-Le",
    "the body": b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nx",
    "a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3e8\r\nx",
}


@pytest.mark.guarantee("rollouts", fault="a reply that stalls or drips")
@pytest.mark.parametrize("timeout", [None, 60.0])
@pytest.mark.parametrize("drips", [False, True], ids=["stalls", "drips"])
@pytest.mark.parametrize("begun", UNFINISHED.values(), ids=UNFINISHED)
def test_an_unfinished_reply_delays_no_other(
    begun: bytes, drips: bool, timeout: float | None
) -> None:
    read = Reader(1)

    def serve(peers: Peers) -> None:
        slow, good = peers[0][0], peers[1][0]
        slow.sendall(begun)
        good.sendall(REPLY)
        for _ in range(100):  # an end, for a client that waits for it
            if read.enough.wait(0.05):
                break
            if drips:
                with suppress(OSError):  # the client has gone
                    slow.sendall(b"x")
        slow.close()

    with listen(serve, 2) as url:
        found = post_all(url, [0, 1], {}, read, timeout)
    assert read.found[0] == found[1] == (200, b"ok")
    assert isinstance(found[0], aiohttp.ClientError)


@pytest.mark.parametrize("begun", UNFINISHED.values(), ids=UNFINISHED)
def test_a_reply_that_drips_past_the_deadline_is_too_late(begun: bytes) -> None:
    def serve(peers: Peers) -> None:
        with suppress(OSError):  # the client has gone
            peers[0][0].sendall(begun)
            for _ in range(200):
                peers[0][0].sendall(b"x")
                time.sleep(0.05)
        peers[0][0].close()

    with listen(serve) as url:
        (fault,) = answers(url, timeout=0.5).values()
    assert isinstance(fault, TimeoutError) and str(fault) == "no answer within 0.5 s"


def test_a_request_that_is_not_read_delays_no_other() -> None:
    """It is larger than the buffers of its connection, and is sent once it is read."""
    long = "x" * (32 << 20)
    read = Reader(1)
    found: list[bool] = []

    def run(listener: socket.socket) -> None:
        first, _ = listener.accept()
        listener.settimeout(10)  # an end, for a client that waits for it
        with first:
            second, _ = listener.accept()
            with second:
                begun = first.recv(400, socket.MSG_PEEK)
                slow, good = (first, second) if b"x" in begun[-2:] else (second, first)
                assert read_request(good) == 1
                good.sendall(REPLY)
                if read.enough.wait(60):
                    found.append(read_request(slow) == long)
                    slow.sendall(REPLY)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = started(run, listener)
        assert post_all(url_of(listener), [long, 1], {}, read) == [(200, b"ok")] * 2
        thread.join(60)
    assert found == [True]


def length(nbytes: int) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % nbytes


class Served(NamedTuple):
    """What a server sends for a request, sound or not, and what becomes of it."""

    reply: bytes
    found: Answer | type[Exception] = (200, b"ok")
    closes: bool = False
    """Whether the connection ends with it."""
    cut: int = 1
    """Bytes that are sent at once."""


def refused(
    reply: bytes,
    error: type[Exception] = aiohttp.ClientError,
    closes: bool = True,
    cut: int = 1 << 20,
) -> Served:
    return Served(reply, error, closes, cut)


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
MANY_HEADS = {
    "continue": b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000,
    "continue, short": b"HTTP/1.1 100 x\n\n" * 15_000 + b"HTTP/1.1 100 x\n",
    "no end": b"HTTP/1.1 200 OK\r\n" + b"x" * 250_000,
}
SERVED = {
    "a length": Served(REPLY),
    "a length, at once": Served(REPLY, cut=1000),
    "no body": Served(length(0), (200, b"")),
    "chunks": Served(CHUNKED + b"1\r\no\r\n1;x=y\r\nk\r\n0\r\n\r\n"),
    "chunks, at once": Served(CHUNKED + b"1\r\no\r\n1;x=y\r\nk\r\n0\r\n\r\n", cut=1000),
    "a chunk that ends like the last": Served(
        CHUNKED + b"4\r\nok\r\n\r\n0\r\n\r\n", (200, b"ok\r\n")
    ),
    "chunks and a trailer": Served(CHUNKED + b"2\r\nok\r\n0\r\nDigest: x\r\n\r\n"),
    "100 before it": Served(b"HTTP/1.1 100 Continue\r\n\r\n" + REPLY),
    "no length": Served(b"HTTP/1.1 200 OK\r\n\r\nok", closes=True),
    # whoever is there would get the tokens, and the engine's key
    "a redirect": Served(
        b"HTTP/1.1 307 Elsewhere\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        (307, b""),
    ),
    "nothing": refused(b"", aiohttp.ClientConnectionError),
    "truncated body": refused(UNFINISHED["the body"], aiohttp.ClientPayloadError),
    "truncated chunk": refused(UNFINISHED["a chunk"], aiohttp.ClientPayloadError),
    "no HTTP": refused(b"+PONG\r\n", closes=False),
    "many headers": refused(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * (1 << 16), closes=False),
    "impossible length": refused(length(0)[:-4] + b"9" * 30 + b"\r\n\r\n{}"),
    "impossible chunk": refused(CHUNKED + b"f" * 30 + b"\r\n{}"),
    "impossible whole chunk": refused(CHUNKED + b"f" * 30 + b"\r\n{}\r\n\r\n"),
    "too long": refused(length(http_requests.LONGEST_REPLY + 1), ReplyTooLongError, closes=False),
    # it took minutes to read, by the square of its length, or for ever
    **{f"head, {name}": refused(head, cut=1 << 16) for name, head in MANY_HEADS.items()},
    **{f"head that drips, {name}": refused(head, cut=1) for name, head in MANY_HEADS.items()},
}


@pytest.mark.timeout(60)
@pytest.mark.guarantee("malformed", fault="a reply of HTTP that announces what it cannot hold")
@pytest.mark.guarantee("malformed", fault="a head of HTTP that keeps its reader busy")
@pytest.mark.parametrize("served", SERVED.values(), ids=SERVED)
def test_a_reply_is_known_before_its_connection_ends(served: Served) -> None:
    """However it is cut into packets; and one that is none is a fault of its request alone."""
    answered = threading.Event()

    def serve(peers: Peers) -> None:
        if len(served.reply) < 1000:  # else it is too many packets
            peers[0][0].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(OSError):  # the client has gone
            for at in range(0, len(served.reply), served.cut):
                peers[0][0].sendall(served.reply[at : at + served.cut])
        peers[1][0].sendall(REPLY)
        if served.closes:
            peers[0][0].close()
        answered.wait(60)

    with listen(serve, 2) as url:
        began = time.process_time()
        found = answers(url, 2, timeout=50)
        assert time.process_time() - began < 20
        answered.set()
    if isinstance(served.found, tuple):
        assert found[0] == served.found
    else:
        assert isinstance(found[0], served.found)
    assert found[1] == (200, b"ok")


FRAMED: dict[str, Callable[[bytes], bytes]] = {
    "a length": lambda body: length(len(body)) + body,
    "chunks": lambda body: CHUNKED + b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n",
    "neither": lambda body: b"HTTP/1.1 200 OK\r\n\r\n" + body,
}


@pytest.mark.guarantee("malformed", fault="a reply of HTTP without an end")
@pytest.mark.parametrize("framed", FRAMED.values(), ids=FRAMED)
@pytest.mark.parametrize("beyond", [0, 1])
def test_a_reply_that_is_longer_than_any_is_refused(
    framed: Callable[[bytes], bytes], beyond: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control is one byte shorter; the connection is closed before the server ends."""
    body, answered = b"x" * 5000, threading.Event()
    monkeypatch.setattr(http_requests, "LONGEST_REPLY", len(body) - beyond)

    def serve(peers: Peers) -> None:
        peers[0][0].sendall(framed(body))
        if framed is FRAMED["neither"]:
            peers[0][0].close()
        answered.wait(60)

    with listen(serve) as url:
        (found,) = answers(url, timeout=50).values()
        answered.set()
    if beyond:
        assert isinstance(found, ReplyTooLongError) and " 4999 bytes" in str(found)
    else:
        assert found == (200, body)


@contextmanager
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """An address that answers no connection, and a short limit for one."""
    monkeypatch.setattr(http_requests, "CONNECT_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as stack:
        address = listener.getsockname()
        for _ in range(4):  # more than wait there
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(address)
        yield address


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[socket.socket]:
    """Every connection that is begun."""
    found: list[socket.socket] = []
    make = http_requests._Batch._socket

    def keep(*args: Any) -> socket.socket:
        found.append(make(*args))
        return found[-1]

    monkeypatch.setattr(http_requests._Batch, "_socket", keep)
    return found


def test_a_host_that_does_not_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch, opened: list[socket.socket]
) -> None:
    """Once the first connections have come to nothing."""
    with silent(monkeypatch) as (host, port):
        found = answers(f"http://{host}:{port}/generate", 512)
    assert {str(fault) for fault in found.values()} == {"no connection within 0.3 s"}
    assert len(found) == 512 and len(opened) == http_requests.OPENING_AT_ONCE


@pytest.mark.guarantee("rollouts", fault="a server that is too busy to accept connections")
def test_a_server_that_accepts_late_loses_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue holds two connections, and takes none for several times the limit of one, which is
    longer than a busy machine stops this process."""
    monkeypatch.setattr(http_requests, "CONNECT_TIMEOUT_S", 1.0)
    count = 24
    with socket.create_server(("127.0.0.1", 0), backlog=1) as listener:

        def run() -> None:
            time.sleep(3.0)
            served = 0
            while served < count:
                peer, _ = listener.accept()
                with peer, suppress(OSError):  # one that was given up as it opened
                    if read_request(peer) is not None:
                        peer.sendall(REPLY)
                        served += 1

        thread = started(run)
        found = answers(url_of(listener), count, timeout=100)
        assert found == dict.fromkeys(range(count), (200, b"ok"))
        thread.join(10)


@pytest.mark.parametrize("first", ["refuses", "is silent"])
def test_each_address_of_a_host_is_tried(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a name is one of IPv6 too, at which nothing listens."""
    look_up = socket.getaddrinfo
    with silent(monkeypatch) as address, listen(answer_all, 3) as url:
        if first == "refuses":
            with socket.create_server(("127.0.0.1", 0)) as gone:
                address = gone.getsockname()

        def both(host: str, port: int, *options: Any, **more: Any) -> Any:
            both_at = (address, ("127.0.0.1", port))
            return [each for at in both_at for each in look_up(*at, *options, **more)]

        monkeypatch.setattr(socket, "getaddrinfo", both)
        found = answers(url.replace("127.0.0.1", "engine"), 3)
        assert found == dict.fromkeys(range(3), (200, b"ok"))


def test_a_host_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = Mock(side_effect=socket.gaierror("Name or service not known"))
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = answers("http://engine:30000/generate", 3)
    assert {str(fault) for fault in found.values()} == {"Name or service not known"}


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        proxy = url_of(gone)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy)
    with listen(answer_all) as url:
        assert answers(url) == {0: (200, b"ok")}


def test_within_a_running_loop() -> None:
    async def within(url: str) -> dict[int, Answer | Fault]:
        return answers(url)

    with listen(answer_all) as url:
        assert asyncio.run(within(url)) == {0: (200, b"ok")}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 127.0.0.1, with its key."""
    file = tmp_path_factory.mktemp("tls") / "both.pem"
    now = datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "engine")])
    key = ec.generate_private_key(ec.SECP256R1())
    built = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    built = built.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
    address = x509.IPAddress(ip_address("127.0.0.1"))
    built = built.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    pem = serialization.Encoding.PEM
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    file.write_bytes(key.private_bytes(pem, *private))
    with file.open("ab") as both:
        both.write(built.sign(key, hashes.SHA256()).public_bytes(pem))
    return file


@pytest.fixture
def secured(certificate: Path) -> ssl.SSLContext:
    """Of a server."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context


def test_a_handshake_that_stalls_delays_no_other(
    secured: ssl.SSLContext, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again, as nothing was sent."""
    monkeypatch.setattr(http_requests, "CONNECT_TIMEOUT_S", 2.0)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    read = Reader(2)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            stalled, _ = listener.accept()
            served = 0
            while served < 3:
                peer, _ = listener.accept()
                # a client on a busy machine may give up a slow handshake, too
                with suppress(OSError), secured.wrap_socket(peer, server_side=True) as secure:
                    message = read_request(secure)
                    secure.sendall(REPLY.replace(b"ok", b"%02d" % message))
                    served += 1
                if served == 2:  # the others have their answers
                    read.enough.wait(60)
            stalled.close()

        thread = started(run)
        found = post_all(url_of(listener, "https"), [0, 1, 2], {}, read, 100)
        assert found == [(200, b"%02d" % i) for i in range(3)]
        thread.join(10)


def test_a_certificate_that_is_not_trusted_is_refused(secured: ssl.SSLContext) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            peer, _ = listener.accept()
            with suppress(OSError), secured.wrap_socket(peer, server_side=True):
                pass

        thread = started(run)
        (fault,) = answers(url_of(listener, "https"), timeout=50).values()
        thread.join(10)
    assert isinstance(fault, ssl.SSLCertVerificationError)


@pytest.mark.parametrize(
    ("timeout", "why"), [(None, "no connection within 0.3 s"), (0.2, "no answer within 0.2 s")]
)
def test_a_server_that_never_shakes_hands(
    timeout: float | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_requests, "CONNECT_TIMEOUT_S", 30.0 if timeout else 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = answers(url_of(listener, "https"), 3, timeout)
    assert {(type(fault), str(fault)) for fault in found.values()} == {(TimeoutError, why)}


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_requests, "MAX_CONNECTIONS", 1)  # a connection that fails is not one
    with socket.create_server(("127.0.0.1", 0)) as gone:
        url = url_of(gone)
    found = answers(url, 3)
    assert [type(fault) for fault in found.values()] == [ConnectionRefusedError] * 3


@pytest.mark.parametrize("ends", ["late", "interrupted", "interrupted as the thread starts"])
def test_requests_that_are_given_up_are_closed(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By which SGLang aborts them; one of them has not even been read. The deadline is that of all
    of them."""
    closed: list[bool] = []
    taken = threading.Event()
    if "starts" in ends:

        class Slow(threading.Thread):
            def start(self) -> None:
                super().start()
                assert taken.wait(20)
                raise KeyboardInterrupt

        monkeypatch.setattr(http_requests, "Thread", Slow)

    def serve(peers: Peers) -> None:
        peers[0][0].sendall(REPLY)
        taken.set()
        if ends == "interrupted":
            os.kill(os.getpid(), signal.SIGINT)
        for peer, _ in peers[1:]:
            peer.settimeout(10)
            closed.append(peer.recv(1) == b"")

    with listen(serve, 3) as url:
        if ends == "late":
            began = time.monotonic()
            first, *others = answers(url, 3, timeout=2.0).values()
            assert time.monotonic() - began < 5  # 2 s for each would be 6
            assert first == (200, b"ok") and [type(each) for each in others] == [TimeoutError] * 2
        else:
            with pytest.raises(KeyboardInterrupt):
                answers(url, 3)
    assert closed == [True, True]


def test_a_request_that_is_not_read_is_closed_at_the_deadline() -> None:
    """Though there is more to send than its connection holds."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        (found,) = post_all(url_of(listener), ["x" * (32 << 20)], {}, lambda answer: answer, 1.0)
        peer, _ = listener.accept()
        with peer:
            peer.settimeout(10)
            with suppress(ConnectionError):
                while peer.recv(1 << 20):
                    pass
    assert str(found) == "no answer within 1 s"


def test_a_dead_host_is_noticed_by_the_kernel(opened: list[socket.socket]) -> None:
    """Keepalive is on, and its probes end within two minutes."""
    options: list[int] = []

    def serve(peers: Peers) -> None:
        options.append(opened[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
        options.extend(
            opened[0].getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
        )
        peers[0][0].sendall(REPLY)

    with listen(serve) as url:
        assert answers(url) == {0: (200, b"ok")}
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
    monkeypatch.setattr(resource, "getrlimit", lambda _: (300, 300))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(http_requests, "SPARE_DESCRIPTORS", 300)
    with (
        listen(answer_all, rounds=3) as url,
        pytest.warns(RuntimeWarning, match="file descriptors allows only 1 at once"),
    ):
        assert answers(url, 3) == dict.fromkeys(range(3), (200, b"ok"))
