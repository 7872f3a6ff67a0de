"""What a rank reads between begin and commit: handles, buckets, segments, and whole sessions."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_fp8rl.protocol.cuda_memory import Handle
from sgl_fp8rl.protocol.framing import FramingError
from sgl_fp8rl.protocol.manifest import Manifest, describe
from sgl_fp8rl.protocol.policy import Policy
from sgl_fp8rl.protocol.states import State
from sgl_fp8rl.receiver.engine_weights import EngineWeights
from sgl_fp8rl.receiver.rank_server import serve
from sgl_fp8rl.receiver.writers import shared_memory
from sgl_fp8rl.receiver.writers.shared_memory import SharedMemory, SharedMemoryError
from tests.fuzz.decoder import Decoder, parse, to_frames
from tests.fuzz.frames import arrived
from tests.sgl_fp8rl.receiver import toy
from tests.trainer_bridge.test_fsdp import plain_engine

HALF = 256
"""Bytes of a chunk: one of the two tensors."""
SHAPES: toy.Shapes = {"a": (HALF // 2,), "b": (HALF // 2,)}
DELTA = b"\5\0\1"
CHANGES = [{"op": "change", "index": n, "bytes": len(DELTA)} for n in range(2)]
HANDLE = {"ipc": "0a" * 64, "nbytes": 4096, "gpu": "GPU-00000000-1111-2222-3333-444444444444"}
BUCKET = {"op": "bucket", "name": "bucket", "bytes": 2 * HALF}
SEGMENTS = {"op": "segments", "name": "segments", "handles": [HANDLE, {**HANDLE, "nbytes": HALF}]}
SEGMENTS["places"] = {"a": [[0, 64, 0, 100], [0, 512, 100, HALF // 2]], "b": [[1, 0, 0, HALF // 2]]}
CHUNKS = [{"op": "chunk", "index": 0}, {"op": "chunk", "index": 1}]
STREAM = [
    {"op": "chunk", "index": 0, "order": ["b", "a"]},
    {"op": "chunk", "index": 1, "order": []},
]
STREAMS = (
    [BUCKET, *STREAM, {"op": "finish"}, {"op": "commit"}],
    [BUCKET, *CHUNKS, {"op": "finish"}],
)
CHANGED = (
    [BUCKET, *CHANGES, {"op": "finish"}, {"op": "commit", "snapshot": "the next one"}],
    [BUCKET, CHANGES[1], CHUNKS[0], {"op": "abort", "reason": "enough of it"}],
    [BUCKET, CHANGES[0], {"op": "abort", "reason": "enough of it"}],
)
SESSIONS = (
    [BUCKET, *CHUNKS, {"op": "finish"}, {"op": "commit"}],
    [BUCKET, CHUNKS[0], {"op": "abort", "reason": "enough of it"}],
    [{"op": "bucket", "name": "bucket", "handle": HANDLE}, *CHUNKS],
    [SEGMENTS, *CHUNKS],
)


class EndedError(Exception):
    """A session that did not commit; the text is the reason that an operator reads."""


class FakeMapping:
    """Another process's device memory, without storage."""

    def __init__(self, handle: Handle, device: int) -> None:
        self.address, self.nbytes = 1 << 20, handle.nbytes

    @property
    def tensor(self) -> torch.Tensor:
        return torch.empty(self.nbytes, dtype=torch.uint8, device="meta")

    def close(self) -> None:
        self.address = 0


def decode_bucket(fd: int, data: bytes) -> None:
    shared = SharedMemory(torch.device("cpu"))
    try:
        shared.open_bucket(parse(data), [fd])
        assert shared.bucket is not None and shared.bucket.content.numel() <= os.fstat(fd).st_size
    finally:
        shared.close()


def decode_segments(manifest: Manifest, data: bytes) -> None:
    shared = SharedMemory(torch.device("cuda", 0))
    shared.open_segments(parse(data))
    segments = shared.mapped()
    segments.check(manifest)
    for name, pieces in segments.places.items():
        spec = manifest.tensors[name]
        row = spec.nbytes // spec.shape[0]
        assert sum(last - first for _, _, (first, last) in pieces) == spec.shape[0]
        for segment, offset, (first, last) in pieces:
            size = segments._mappings[segment].nbytes
            assert 0 <= offset < offset + (last - first) * row <= size


def decode_session(weights: EngineWeights, fingerprint: str, fd: int, data: bytes) -> None:
    weights.session = None
    weights.memory.close()
    session = weights.begin(fingerprint, Policy(toy.RUN, 1))
    with arrived(data, (fd,)) as sock:
        listener: Any = SimpleNamespace(
            accept=lambda token, silence_s, known, snapshot: sock, heard=lambda: None
        )
        outcome, peer = serve(listener, session, "token", 10.0)
        assert outcome.dirty == session.dirty
        assert not outcome.committed or (session.finished and peer is sock)
        if outcome.can_roll_back:
            session.undo()
    if not outcome.committed:
        # an error that no step documents
        assert "failed with" not in outcome.reason, outcome.reason
        raise EndedError(f"the session ended: {' '.join(outcome.reason.split())}")


def decode_changes(weights: EngineWeights, fingerprint: str, fd: int, data: bytes) -> None:
    weights.state, weights._snapshot = (
        State.SERVING,
        (weights._writers[fingerprint], "the last one"),
    )
    decode_session(weights, fingerprint, fd, data)


def decode_stream(
    weights: EngineWeights, manifest: Manifest, fingerprint: str, fd: int, data: bytes
) -> None:
    weights.accept(manifest)
    decode_session(weights, fingerprint, fd, data)


def engine() -> EngineWeights:
    """A rank with two vectors, each a chunk."""
    return plain_engine({name: torch.zeros(shape) for name, shape in SHAPES.items()}).ranks[0]


@contextmanager
def decoders() -> Iterator[list[Decoder]]:
    with (
        pytest.MonkeyPatch.context() as patch,
        os.fdopen(os.memfd_create("fuzz", os.MFD_ALLOW_SEALING), "r+b") as file,
    ):
        patch.setattr(shared_memory, "Mapping", FakeMapping)
        file.truncate(4 * HALF)
        fd, weights = file.fileno(), engine()
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        tensors = {name: torch.ones(shape, dtype=toy.BF16) for name, shape in SHAPES.items()}
        manifest = describe(tensors.items(), HALF)
        weights.accept(manifest)
        mapped = Manifest(manifest.tensors, HALF, frozenset(SHAPES))
        for slot in range(2):
            os.pwrite(fd, DELTA, slot * HALF)
        changes = partial(decode_changes, weights, manifest.fingerprint, fd)
        session = partial(decode_session, weights, manifest.fingerprint, fd)
        streamed = describe(tensors.items(), HALF, streamed=True)
        stream = partial(decode_stream, weights, streamed, streamed.fingerprint, fd)
        refused = FramingError, SharedMemoryError
        yield [
            Decoder("handle", (HANDLE,), lambda data: Handle.from_json(parse(data)), WRONG),
            Decoder("bucket", (BUCKET,), partial(decode_bucket, fd), (*refused, ValueError)),
            Decoder("segments", (SEGMENTS,), partial(decode_segments, mapped), (*refused, *WRONG)),
            Decoder("session", SESSIONS, session, (EndedError,), to_frames),
            Decoder("changes", CHANGED, changes, (EndedError,), to_frames),
            Decoder("stream", STREAMS, stream, (EndedError,), to_frames),
        ]
        weights.memory.close()


WRONG = FramingError, ValueError
