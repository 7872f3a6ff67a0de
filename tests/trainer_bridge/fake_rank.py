"""A rank of an engine as its trainer sees it: a socket that answers as told."""

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from sgl_fp8rl.protocol import framing
from sgl_fp8rl.protocol.place import here
from sgl_fp8rl.receiver.writers.shared_memory import SharedMemory

JOIN_S = 20.0
TOKEN = "the session's token"
DONE = {"ok": True, "gpu_seconds": None}
LAYOUT: dict[str, Any] = {
    **{"dtype": "bfloat16", "bucket_bytes": 1 << 20, "state": "serving", "place": here()},
    **{"fp32": [], "skipped": [], "tied": None, "formats": {}, "gpus": [], "visible_gpus": []},
}
"""An engine's answer to a control message of that name."""
Answer = Callable[[dict[str, Any]], dict[str, Any] | None]


class Rank:
    """Serves ``sessions`` trainers, one after the other.

    Args:
        answer: its reply to each message; after an error or a commit it hangs up, and at once where
            it is None.
    """

    def __init__(
        self, folder: Path, answer: Answer = lambda message: DONE, sessions: int = 1
    ) -> None:
        self.path = str(folder / f"{id(self)}.sock")
        self.answer = answer
        self.messages: list[dict[str, Any]] = []
        self.chunks: list[bytes] = []
        """The whole bucket as it was when each chunk was read."""
        self.memory = SharedMemory(torch.device("cpu"))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._run, args=(sessions,), daemon=True)
        self._thread.start()

    def ops(self) -> list[Any]:
        return [message.get("op", "hello") for message in self.messages]

    def join(self) -> None:
        """Wait until its last trainer is gone.

        Raises:
            AssertionError: it still waits for one.
        """
        self._thread.join(JOIN_S)
        assert not self._thread.is_alive(), "a rank still waits for the trainer"

    def _run(self, sessions: int) -> None:
        with self._listener:
            for _ in range(sessions):
                peer, _ = self._listener.accept()
                with peer, suppress(ConnectionError):  # the trainer may hang up
                    self._serve(peer)

    def _serve(self, peer: socket.socket) -> None:
        while True:
            message, fds = framing.receive(peer)
            self.messages.append(message)
            reply = self.answer(message)
            if message.get("op") == "bucket":
                self.memory.open_bucket(message, fds)
            for fd in fds:
                os.close(fd)
            if message.get("op") == "chunk":
                self.chunks.append(self.read())
            if reply is None:
                return
            if "token" in message:
                reply = {"known": self.memory.known(), **reply}
            framing.send(peer, reply)
            if "error" in reply or message.get("op") == "commit":
                return

    def read(self) -> bytes:
        """The bucket as it is now."""
        assert self.memory.bucket is not None
        return self.memory.bucket.content.numpy().tobytes()


def refuse(op: str, sentence: str) -> Answer:
    return lambda message: {"error": sentence} if message.get("op") == op else DONE


def hang_up(op: str) -> Answer:
    return lambda message: None if message.get("op") == op else DONE
