"""What a relay reads of a trainer on another host, and what the trainer reads of it.

A rank's own socket reads the same hello.
"""

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Condition, Lock
from typing import Any

from sgl_fp8rl.protocol.framing import FramingError
from sgl_fp8rl.protocol.place import HostMemory
from sgl_fp8rl.receiver import rank_server
from sgl_fp8rl.receiver.relay.changes import SessionChanges
from sgl_fp8rl.receiver.relay.door import Door
from sgl_fp8rl.receiver.relay.memory import RelayMemory
from sgl_fp8rl.receiver.relay.ranks import RelayRanks
from sgl_fp8rl.receiver.relay.relay import Relay
from tests.fuzz.decoder import Decoder, to_frames
from tests.fuzz.frames import TIMEOUT_S, arrived
from trainer_bridge.engines.engine_client import EngineError
from trainer_bridge.transport.relay_client import RelayClient

ROOM = 512
TOKEN = "the session's token"
HELLOS = [{"token": TOKEN}], [{"token": "another"}, {}]
BUCKET = {"op": "bucket", "name": "bucket", "bytes": ROOM}
CHUNK = {"op": "chunk", "index": 0, "offset": 0, "bytes": ROOM}
SESSIONS = (
    [BUCKET, CHUNK, {**CHUNK, "index": 1, "offset": 64, "bytes": 8}, {"op": "finish"}],
    [BUCKET, {**CHUNK, "order": ["a", "b"]}, {"op": "commit", "snapshot": "next"}],
    [BUCKET, {**CHUNK, "change": 3}, {**CHUNK, "index": 1, "change": ROOM}, {"op": "finish"}],
    [BUCKET, {**CHUNK, "written": True}, {**CHUNK, "index": 1, "offset": 64, "bytes": 8}],
)
SENDERS = (
    [CHUNK, {**CHUNK, "index": 1, "offset": 64, "bytes": 8}],
    [{**CHUNK, "change": 3}, {**CHUNK, "index": 1, "change": ROOM}],
)
REPLIES = (
    [{"replies": [{"ok": True, "gpu_seconds": None}, {"ok": True}]}],
    [{"replies": []}, {"replies": [{"ok": True}]}],
)


def with_content(messages: Any) -> bytes:
    """The frames of a list of messages, with the bytes of its chunks behind theirs."""
    data = b""
    for message in messages if isinstance(messages, list) else [messages]:
        size = message.get("change", message.get("bytes")) if isinstance(message, dict) else None
        is_chunk = type(size) is int and message.get("op") == "chunk"
        data += to_frames([message]) + b"\1" * (min(max(size, 0), ROOM) if is_chunk else 0)
    return data


def decode_hello(data: bytes) -> None:
    with arrived(data) as sock:
        while sock.recv(1, socket.MSG_PEEK):
            rank_server._holds(sock, TOKEN)


def threadless() -> Relay:
    """A relay without its threads."""
    relay = object.__new__(Relay)
    memories = RelayMemory(ROOM, 2 * ROOM)
    relay._memories, relay._memory = memories, None
    relay._changes, relay._told = SessionChanges(2 * ROOM), {"snapshot": "before"}
    relay._ranks, relay._silence_s = RelayRanks(), TIMEOUT_S
    relay._sending, relay._written, relay._writing = Lock(), Condition(), 0
    return relay


def decode(data: bytes) -> None:
    relay = threadless()
    relay._door = Door("127.0.0.1")
    with arrived(data) as sock, closing(relay._door):
        while sock.recv(1, socket.MSG_PEEK):
            relay._pass_message(sock, sock)


def decode_sender(data: bytes) -> None:
    relay = threadless()
    relay._memory = HostMemory(ROOM)
    with arrived(data) as sock:
        while sock.recv(1, socket.MSG_PEEK):
            relay._pass_chunk(sock)


def decode_replies(data: bytes) -> None:
    client = object.__new__(RelayClient)
    with arrived(data) as sock:
        client._sockets, client.timeout_s = [sock], TIMEOUT_S
        while sock.recv(1, socket.MSG_PEEK):
            client.wait()


@contextmanager
def decoders() -> Iterator[list[Decoder]]:
    errors = FramingError, ValueError, ConnectionError
    hello_errors = FramingError, UnicodeEncodeError  # as ``accept`` awaits them
    yield [
        Decoder("hello", HELLOS, decode_hello, hello_errors, to_frames),
        Decoder("relay", SESSIONS, decode, errors, with_content),
        Decoder("relay sender", SENDERS, decode_sender, errors, with_content),
        Decoder("relay replies", REPLIES, decode_replies, (EngineError,), to_frames, relays=True),
    ]
