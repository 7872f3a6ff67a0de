"""What the server tests have in common: updates sent by hand, and what a server then serves."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import trainer_bridge
from sgl_fp8rl.protocol import place
from sgl_fp8rl.protocol.chunks import cut_into_chunks
from sgl_fp8rl.protocol.manifest import Manifest, describe
from sgl_fp8rl.receiver.writers.shared_memory import Slot
from tests.engine import expected
from tests.engine.harness import BUCKET_BYTES, STREAMS, Server
from trainer_bridge.engines.engine_client import EngineClient, EngineError
from trainer_bridge.session import participant
from trainer_bridge.transport.rank_client import RankClients
from trainer_bridge.updates.update import RUN, UpdateResult
from trainer_bridge.ways.carriers import Bucket

PROMPT = list(range(1, 17))
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
ASK = {"input_ids": PROMPT, "sampling_params": GREEDY}

Tensors = list[tuple[str, torch.Tensor]]


def leave_the_host(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have this process take itself for a trainer on another host, which reaches no rank's socket.

    Args:
        folder: for what its kernel would say.
    """
    (folder / "boot_id").write_text("of another kernel")
    patch.setattr(place, "BOOT", folder / "boot_id")
    patch.setattr(participant, "RankClients", None)


def version_of(server: Server) -> int:
    return int(server.control({"op": "layout"})["version"])


def update(server: Server, checkpoint: Path, stream: str = "bf16") -> int:
    """Bring the server to a policy as its next version."""
    version = version_of(server) + 1
    result = trainer_bridge.update(STREAMS[stream](checkpoint), server, version=version)
    assert result.version == version
    return version


def assert_alive(server: Server) -> None:
    """Its scheduler answers. SGLang's /health takes a second."""
    assert server.process.poll() is None
    assert "state" in server.control({"op": "layout"})


def assert_serves(server: Server, checkpoint: Path, version: int, tp_size: int = 1) -> None:
    """It holds this checkpoint's bytes and samples with them as this version."""
    layout = server.control({"op": "layout"})
    assert (layout["state"], layout["version"]) == ("serving", version)
    assert_holds(server, checkpoint, tp_size)
    (reply,) = server.generate(ASK)
    assert reply["meta_info"]["policy_version"] == [version] * len(reply["output_ids"])
    assert len(reply["output_ids"]) == GREEDY["max_new_tokens"]


def assert_holds(server: Server, checkpoint: Path, tp_size: int = 1) -> None:
    ranks = server.control({"op": "digest"})["ranks"]
    power_of_two = "block-fp8-ue8m0" in server.control({"op": "layout"})["formats"]
    all_wanted = expected.digests(checkpoint, tp_size, power_of_two=power_of_two)
    for wanted, held in zip(all_wanted, ranks, strict=True):
        assert {name: held[name]["sha256"] for name in wanted} == wanted


def assert_few_bytes(result: UpdateResult) -> None:
    """Changes of ``models.step`` have travelled, and nothing else."""
    assert 0.002 * result.bytes < result.network_bytes < 0.1 * result.bytes, result


def assert_quarantined(server: Server, reason: str) -> None:
    layout = server.control({"op": "layout"})
    assert layout["state"] == "quarantined"
    assert reason in layout["reason"]
    with pytest.raises(EngineError, match="quarantined") as refusal:
        server.generate(ASK)
    assert refusal.value.status == 503
    assert reason in str(refusal.value)


def manifest_of(tensors: Tensors, mapped: tuple[str, ...] = ()) -> Manifest:
    return describe(tensors, BUCKET_BYTES // 2, mapped)


def begin_message(manifest: Manifest, version: int) -> dict[str, Any]:
    return {
        "op": "begin",
        "run": RUN,
        "version": version,
        "fingerprint": manifest.fingerprint,
        "transaction": "by hand",
        "manifest": manifest.to_json(),
    }


def begin(engine: EngineClient, tensors: Tensors, version: int, **more: Any) -> dict[str, Any]:
    return engine.control(begin_message(manifest_of(tensors), version) | more)


class ByHand:
    """A trainer in the middle of an update, whose steps the test takes.

    Args:
        begun: the engine's reply to ``begin``.

    Raises:
        EngineError: a step is refused.
    """

    def __init__(self, begun: dict[str, Any], tensors: Tensors) -> None:
        self.manifest = manifest_of(tensors)
        self.chunks = cut_into_chunks(self.manifest)
        self.ranks = RankClients(begun["sockets"], begun["token"])
        self.bucket = Bucket(self.manifest.bucket_bytes)
        self._tensors = dict(tensors)
        self._shared = False

    def write(self, *indices: int) -> None:
        """Send these chunks, each when the one before it is written."""
        if not self._shared:
            self.bucket.share(self.ranks)
            self._shared = True
        bucket = Slot(self.bucket.content, 0)
        for index in indices:
            for chunk_slice in self.chunks[index]:
                rows = self._tensors[chunk_slice.name][slice(*chunk_slice.rows)]
                bucket.tensor(chunk_slice, self.manifest.tensors[chunk_slice.name]).copy_(rows)
            self.ranks.ask({"op": "chunk", "index": index})

    def write_from(self, first: int) -> None:
        """Send this chunk and all that follow."""
        self.write(*range(first, len(self.chunks)))
        self.ranks.ask({"op": "finish"})

    def commit_from(self, first: int) -> None:
        """Send this chunk and all that follow, and commit."""
        self.write_from(first)
        self.ranks.ask({"op": "commit"})

    def close(self) -> None:
        self.ranks.close()
        self.bucket.close()


@contextmanager
def by_hand(server: Server, tensors: Tensors, version: int, **more: Any) -> Iterator[ByHand]:
    """An update whose chunks the test sends; at the end it is over, one way or another.

    Args:
        more: fields of the message that begins it.
    """
    trainer = ByHand(begin(server, tensors, version, **more), tensors)
    try:
        yield trainer
    finally:
        trainer.close()
        server.control({"op": "end"})
