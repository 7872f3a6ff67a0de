"""Messages between trainer and rank: a length and JSON on a Unix socket; no pickle anywhere.

A message is ``{"op": ...}`` or a reply ``{"ok": ...}`` / ``{"error": "<sentence>"}``. Memory is
shared by descriptor or by handle, once; the weights themselves never pass through the socket.
"""

import json
import os
import socket
import struct
import time
from typing import Any

MAX_MESSAGE_BYTES = 256 << 20
RETRY_ON_HOST = {"retry": "host"}
"""Beside an error: nothing was written, and the same update can go through host memory."""
_LENGTH = struct.Struct("!I")


class FramingError(ConnectionError):
    """The peer went away, or speaks something else."""


def send(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send one message, with open file descriptors for the peer to keep."""
    body = json.dumps(message).encode()
    header = _LENGTH.pack(len(body))
    if fds:
        socket.send_fds(sock, [header], list(fds))
        sock.sendall(body)
    else:
        sock.sendall(header + body)


def receive(
    sock: socket.socket, most_bytes: int = MAX_MESSAGE_BYTES
) -> tuple[dict[str, Any], list[int]]:
    """Receive one message and the file descriptors that came with it.

    Args:
        most_bytes: what the peer may send.

    Raises:
        FramingError: the connection ended, or the message is not a JSON object of a sane size.
        TimeoutError: no message began within the socket's timeout, or it did not end within as
            long again, however its bytes trickle in.
    """
    header, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, 4)
    try:
        timeout = sock.gettimeout()
        deadline = None if timeout is None else time.monotonic() + timeout
        header += _exactly(sock, _LENGTH.size - len(header), deadline)
        (length,) = _LENGTH.unpack(header)
        if length > most_bytes:
            raise FramingError(f"a message of {length} bytes came; the peer is not a bridge")
        message = _parse(_exactly(sock, length, deadline))
        sock.settimeout(timeout)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return message, fds


def peer_uid(sock: socket.socket) -> int:
    """The user id of the process at the other end of a Unix socket."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)


def _parse(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FramingError(f"a message is not JSON ({error}); the peer is not a bridge") from error
    if not isinstance(message, dict):
        raise FramingError("a message is not a JSON object; the peer is not a bridge")
    return message


def _exactly(sock: socket.socket, size: int, deadline: float | None) -> bytes:
    received = []
    while size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("a message did not end in time")
            sock.settimeout(left)
        data = sock.recv(min(size, 1 << 20))
        if not data:
            raise FramingError("the connection ended in the middle of an update")
        received.append(data)
        size -= len(data)
    return b"".join(received)
