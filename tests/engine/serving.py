"""What the server tests have in common: updates sent by hand, and what a server then serves."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import trainer_bridge
from sgl_fp8rl.weight_update.manifest import describe
from tests.engine import expected
from tests.engine.harness import BUCKET_BYTES, STREAMS, Server
from trainer_bridge.engine_client import EngineError
from trainer_bridge.transport.memory import MemoryTransport

PROMPT = list(range(1, 17))
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
ASK = {"input_ids": PROMPT, "sampling_params": GREEDY}

Tensors = list[tuple[str, torch.Tensor]]


def version_of(server: Server) -> int:
    return int(server.control({"op": "layout"})["version"])


def update(server: Server, checkpoint: Path, stream: str = "bf16") -> int:
    """Bring the server to a policy as its next version."""
    version = version_of(server) + 1
    result = trainer_bridge.update(STREAMS[stream](checkpoint), server, version=version)
    assert result.version == version
    return version


def assert_serves(server: Server, checkpoint: Path, version: int) -> None:
    """It holds this checkpoint's bytes and samples with them as this version."""
    layout = server.control({"op": "layout"})
    assert (layout["state"], layout["version"]) == ("serving", version)
    assert_holds(server, checkpoint)
    (reply,) = server.generate(ASK)
    assert reply["meta_info"]["policy_version"] == [version] * len(reply["output_ids"])
    assert len(reply["output_ids"]) == GREEDY["max_new_tokens"]


def assert_holds(server: Server, checkpoint: Path) -> None:
    (wanted,) = expected.digests(checkpoint, 1)
    (held,) = server.control({"op": "digest"})["ranks"]
    assert {name: held[name]["sha256"] for name in wanted} == wanted


def assert_quarantined(server: Server, reason: str) -> None:
    layout = server.control({"op": "layout"})
    assert layout["state"] == "quarantined"
    assert reason in layout["reason"]
    with pytest.raises(EngineError, match="quarantined") as refusal:
        server.generate(ASK)
    assert refusal.value.status == 503
    assert reason in str(refusal.value)
    assert server.status_of("/health") == 200


@contextmanager
def by_hand(server: Server, tensors: Tensors, version: int) -> Iterator[MemoryTransport]:
    """An update whose parts the test sends; at the end it is over, one way or another."""
    manifest = describe(tensors, version).to_json()
    begun = server.control({"op": "begin", "manifest": manifest})
    transport = MemoryTransport(begun["sockets"], begun["token"], BUCKET_BYTES)
    try:
        yield transport
    finally:
        transport.close()
        server.control({"op": "end"})


def put(transport: MemoryTransport, tensors: Tensors) -> None:
    """Send matrices by 128 rows, and all else whole."""
    for name, tensor in tensors:
        rows = tensor.shape[0]
        step = 128 if tensor.dim() == 2 and rows > 128 else rows
        for start in range(0, rows, step):
            transport.put(name, tensor[start : start + step], (start, min(start + step, rows)))


def send_all(transport: MemoryTransport, tensors: Tensors) -> None:
    put(transport, tensors)
    transport.finish()
    transport.commit()


def flush(transport: MemoryTransport) -> None:
    """Send what was put, and wait until it is written."""
    transport._send_part()
    while transport._unanswered:
        transport._wait_part()
