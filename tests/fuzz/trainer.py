"""What a trainer reads: replies of ranks, the layout, and HTTP."""

import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_fp8rl.protocol import framing
from sgl_fp8rl.protocol.kv_schema import KV_SCALES
from sgl_fp8rl.protocol.manifest import ManifestError, describe
from sgl_fp8rl.protocol.policy import Policy
from tests.fuzz.decoder import Decoder, parse, to_frames
from tests.trainer_bridge import fake_rank
from trainer_bridge.engines import engine_client
from trainer_bridge.engines.engine_client import EngineError, HTTPEngine
from trainer_bridge.session.kept import EngineConnection
from trainer_bridge.session.update_session import slowest_gpu
from trainer_bridge.sources.announcement import announced
from trainer_bridge.transfer.layout import comparable, gpu_of
from trainer_bridge.transport import rank_client
from trainer_bridge.transport.rank_client import RankClients
from trainer_bridge.ways.sender import Sender

TIMEOUT_S = 10.0
NAMED = [("w", torch.zeros(256, 128, dtype=torch.bfloat16)), ("n", torch.zeros(64))]
LAYOUT: dict[str, Any] = {
    **fake_rank.LAYOUT,
    **{"fp32": ["n"], "formats": {"block-fp8": ["w"]}, "kv_cache": {"layers": 2, "kv_heads": 1}},
    **{"logprobs": {"raw": False}, "routed_experts": None, "version": 3, "reason": ""},
}
REPLIES = (
    [{"ok": True, "known": ["bucket"]}, {"ok": True, "gpu_seconds": 0.5}, {"ok": True}],
    [{"ok": True, "known": []}, {"ok": True, "gpu_seconds": None}, {"error": "a rank is dirty"}],
    [{"error": "this socket serves another session"}],
)
TENSORS = {"shapes": {"a": [4, 8], "b": [3]}}


def decode_replies(listener: socket.socket, patch: pytest.MonkeyPatch, data: bytes) -> None:
    """One rank, which answered all at once and hung up."""
    accepted = []

    def send(sock: socket.socket, message: Any, fds: tuple[int, ...] = ()) -> None:
        if "token" in message:
            peer, _ = listener.accept()
            accepted.append(peer)
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)

    patch.setattr(rank_client.framing, "send", send)
    ranks = None
    try:
        ranks = RankClients([listener.getsockname()], "token")
        assert all(type(name) is str for name in ranks.known)
        seconds = slowest_gpu(ranks.ask({"op": "finish"}))
        assert seconds is None or seconds >= 0
        ranks.ask({"op": "commit"})
    finally:
        for sock in accepted:
            sock.close()
        if ranks is not None:
            ranks.close()


def decode_layout(data: bytes) -> None:
    client: Any = SimpleNamespace(control=lambda message, timeout_s=9.0: parse(data))
    connection = EngineConnection(client)
    layout = connection.layout()
    gpu_of(NAMED, layout)
    sender = Sender(
        {**comparable(layout, through_host=False, is_remote=False), "gpus": layout["gpus"]}
    )
    sender.plan(NAMED, None, None)
    sender.settled([(KV_SCALES, torch.ones(2, 2, 1))], None)
    connection.committed(Policy("run", 0))


def decode_tensors(data: bytes) -> None:
    client: Any = SimpleNamespace(control=lambda message, timeout_s=9.0: parse(data))
    named = announced(None, client, torch.bfloat16, ["a"])
    describe(named)


def decode_http(patch: pytest.MonkeyPatch, status: int, data: bytes) -> None:
    patch.setattr(
        engine_client, "post_all", lambda url, messages, headers, read, _: [read((status, data))]
    )
    assert isinstance(HTTPEngine("http://localhost", None).control({"op": "end"}), dict)


@contextmanager
def decoders() -> Iterator[list[Decoder]]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory() as folder,
        listener,
    ):
        listener.settimeout(TIMEOUT_S)
        listener.bind(str(Path(folder) / "rank"))
        listener.listen()
        layout_errors = framing.FramingError, EngineError, ManifestError
        refused = (EngineError,)
        errors = {"error": "requests were still running"}, {"error": {"message": "SGLang's own"}}
        replied = partial(decode_replies, listener, patch)
        http, failed = (partial(decode_http, patch, status) for status in (200, 400))
        told = {"relays": True, "reports": True}
        yield [
            Decoder("rank replies", REPLIES, replied, refused, to_frames, relays=True),
            Decoder("layout", (LAYOUT,), decode_layout, layout_errors),
            Decoder("tensors", (TENSORS,), decode_tensors, layout_errors),
            Decoder("HTTP reply", (LAYOUT,), http, refused),
            Decoder("HTTP error", errors, failed, refused, **told),
        ]
